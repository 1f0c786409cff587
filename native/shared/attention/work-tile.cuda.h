// How prefill attention is cut into work tiles. A tile is a range of queries of one query head.
//
// Tiles with neighbouring numbers run at about the same time, so they should share keys in L2. The order is: batch
// entry, then kv head, then from the longest causal tile to the shortest, then the query heads that read this kv
// head.
#pragma once

#include <cstdint>

#include "shared/paged/paged-attention.h"

namespace kv {

struct PrefillTile {
  int first_row;    // of the batch entry; index in `query`
  int query_count;  // of the batch entry
  int first_query;  // of the tile, within the batch entry
  int query_head;
  int kv_head;
  int slot;
  int key_count;     // keys of this kv head
  int visible_keys;  // keys that the tile's first query sees; query i of the tile sees min(visible_keys + i, key_count)
  int key_tiles;     // key tiles to read; 0 if no query of the tile sees a key
};

// Finds tiles by number. The numbers must ascend from call to call.
template <int kQueryTile, int kKeyTile>
class PrefillWork {
 public:
  using Tile = PrefillTile;

  __device__ explicit PrefillWork(const PagedAttentionArguments& arguments) : arguments_(arguments) {}

  // Returns false when `number` is beyond the last tile.
  __device__ bool find(int64_t number, PrefillTile* tile) {
    int query_tiles = tiles_of_entry();
    while (entry_ < arguments_.batch &&
           number >= first_number_ + int64_t{query_tiles} * arguments_.query_heads) {
      first_number_ += int64_t{query_tiles} * arguments_.query_heads;
      ++entry_;
      query_tiles = tiles_of_entry();
    }
    if (entry_ >= arguments_.batch) return false;
    const int group = arguments_.query_heads / arguments_.kv_heads;
    const int within_entry = static_cast<int>(number - first_number_);
    const int within_head = within_entry % (query_tiles * group);
    tile->kv_head = within_entry / (query_tiles * group);
    tile->query_head = tile->kv_head * group + within_head % group;
    tile->first_query = (query_tiles - 1 - within_head / group) * kQueryTile;
    tile->first_row = arguments_.query_start[entry_];
    tile->query_count = arguments_.query_start[entry_ + 1] - tile->first_row;
    tile->slot = arguments_.slots[entry_];
    tile->key_count = arguments_.key_counts[int64_t{tile->slot} * arguments_.kv_heads + tile->kv_head];
    tile->visible_keys =
        arguments_.causal ? tile->key_count - tile->query_count + tile->first_query + 1 : tile->key_count;
    const int queries = min(kQueryTile, tile->query_count - tile->first_query);
    const int last_key = arguments_.causal ? tile->visible_keys + queries - 1 : tile->key_count;
    tile->key_tiles = (max(last_key, 0) + kKeyTile - 1) / kKeyTile;
    return true;
  }

 private:
  __device__ int tiles_of_entry() const {
    if (entry_ >= arguments_.batch) return 0;
    const int queries = arguments_.query_start[entry_ + 1] - arguments_.query_start[entry_];
    return (queries + kQueryTile - 1) / kQueryTile;
  }

  const PagedAttentionArguments& arguments_;
  int entry_ = 0;
  int64_t first_number_ = 0;
};

}  // namespace kv
