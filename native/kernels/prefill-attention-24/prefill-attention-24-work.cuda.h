// How prefill attention over dense and 2:4 blocks is cut into work tiles. A tile is a range of the query rows that
// read one kv head of a batch entry. Row r is query r / group of query head kv_head * group + r % group, so that a
// chunk of few queries still fills tiles. Device code.
//
// Tiles with neighbouring numbers run at about the same time, so they should share keys in L2. The order is: batch
// entry, then kv head, then from the longest causal tile to the shortest.
#pragma once

#include <cstdint>

#include "shared/blocks-24/blocks-24.h"

namespace kv {

// How many of the first blocks of a cache head all rows of a range see in full, and how many at least one row sees.
struct SeenBlocks {
  int full;
  int seen;
};

struct PrefillTile24 {
  int first_token;  // of the batch entry; index in `query`
  int first_row;    // of the tile
  int rows;         // of the batch entry; the tile's last rows may lie beyond them
  int kv_head;
  int cache_head;  // row in the index maps
  int group;       // query heads that read the kv head
  int key_count;   // keys of this kv head
  int hidden_keys;  // hidden from the batch entry's first query, when causal: query i sees key_count - hidden_keys + i
  int key_blocks;  // key blocks to read; 0 if no row of the tile sees a key

  // How many of the first keys a row sees. Rows beyond the last see what the last row sees.
  __device__ int visible(int row) const {
    const int seen = key_count - hidden_keys + (hidden_keys > 0 ? min(row, rows - 1) / group : 0);
    return min(max(seen, 0), key_count);
  }

  // The blocks that the rows first .. first + count - 1 see.
  __device__ SeenBlocks blocks(int first, int count) const {
    if (first >= rows) return {0, 0};
    const int last_seen = visible(first + count - 1);
    return {visible(first) / kBlock24Tokens, (last_seen + kBlock24Tokens - 1) / kBlock24Tokens};
  }

  __device__ int64_t token(int row) const { return int64_t{first_token} + row / group; }
  __device__ int query_head(int row) const { return kv_head * group + row % group; }
};

// Finds tiles by number. The numbers must ascend from call to call.
template <int kTileRows>
class PrefillWork24 {
 public:
  using Tile = PrefillTile24;

  __device__ explicit PrefillWork24(const PagedAttentionArguments& arguments)
      : arguments_(arguments), group_(arguments.query_heads / arguments.kv_heads) {}

  // Returns false when `number` is beyond the last tile.
  __device__ bool find(int64_t number, PrefillTile24* tile) {
    int tiles = tiles_of_head();
    while (entry_ < arguments_.batch && number >= first_number_ + int64_t{tiles} * arguments_.kv_heads) {
      first_number_ += int64_t{tiles} * arguments_.kv_heads;
      ++entry_;
      tiles = tiles_of_head();
    }
    if (entry_ >= arguments_.batch) return false;
    const int within_entry = static_cast<int>(number - first_number_);
    const int queries = queries_of_entry();
    tile->first_token = arguments_.query_start[entry_];
    tile->rows = queries * group_;
    tile->first_row = (tiles - 1 - within_entry % tiles) * kTileRows;
    tile->kv_head = within_entry / tiles;
    tile->cache_head = arguments_.slots[entry_] * arguments_.kv_heads + tile->kv_head;
    tile->group = group_;
    tile->key_count = arguments_.key_counts[tile->cache_head];
    tile->hidden_keys = arguments_.causal ? queries - 1 : 0;
    tile->key_blocks = tile->blocks(tile->first_row, kTileRows).seen;
    return true;
  }

 private:
  __device__ int queries_of_entry() const {
    return arguments_.query_start[entry_ + 1] - arguments_.query_start[entry_];
  }
  __device__ int tiles_of_head() const {
    return entry_ < arguments_.batch ? (queries_of_entry() * group_ + kTileRows - 1) / kTileRows : 0;
  }

  const PagedAttentionArguments& arguments_;
  const int group_;
  int entry_ = 0;
  int64_t first_number_ = 0;
};

// ---- A warp's work on a tile. `Attention` is a PrefillWarp24. ----

template <typename Element, typename Attention>
__device__ void load_queries(const PagedAttentionArguments& arguments, const PrefillTile24& tile, int first_row,
                             Attention& attention) {
#pragma unroll
  for (int i = 0; i < Attention::kRowTiles; ++i) {
    const int row = first_row + 8 * i + threadIdx.x % 32 / 4;
    const Element* query = nullptr;
    if (row < tile.rows) {
      query = static_cast<const Element*>(arguments.query) + tile.token(row) * arguments.query_token_stride +
              tile.query_head(row) * arguments.query_head_stride;
    }
    attention.set_query(i, query);
  }
}

// Hides from each row the keys of a block that it does not see.
template <typename Attention>
__device__ void mask_scores(const PrefillTile24& tile, int first_row, int block, Attention& attention) {
  // Each lane computes this for one row.
  const int lane = threadIdx.x % 32;
  const int seen_by_row = tile.visible(first_row + lane) - block * kBlock24Tokens;
  int seen[2 * Attention::kRowTiles];
#pragma unroll
  for (int i = 0; i < 2 * Attention::kRowTiles; ++i) {
    seen[i] = __shfl_sync(0xffffffffu, seen_by_row, i / 2 * 8 + lane % 4 * 2 + i % 2);
  }
  attention.mask(seen);
}

// Turns the scores of a block into weights. `masked` must be true unless all rows see all keys of the block.
template <typename Attention>
__device__ __forceinline__ void weigh_keys(const PrefillTile24& tile, int first_row, int block, bool masked,
                                           typename Attention::Stage& keys, bool sparse, Attention& attention) {
  for (bool again = false;; again = true) {
    attention.score(keys, sparse);
    if (masked) mask_scores(tile, first_row, block, attention);
    if (again) attention.raise();
    if (attention.weigh()) return;
  }
}

template <typename Element, typename Attention>
__device__ void store_outputs(const PagedAttentionArguments& arguments, const PrefillTile24& tile, int first_row,
                              const Attention& attention) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < Attention::kRowTiles; ++i) {
    const int row = first_row + 8 * i + lane / 4;
    Element* output = static_cast<Element*>(arguments.output) + tile.token(row) * arguments.output_token_stride +
                      tile.query_head(row) * arguments.output_head_stride + lane % 4 * 2;
#pragma unroll
    for (int dim = 0; dim < Attention::kHeadDim; dim += 8) {
      const uint32_t pair = attention.output(i, dim / 8);
      if (row < tile.rows) *reinterpret_cast<uint32_t*>(output + dim) = pair;
    }
    if (arguments.log_sum_exp == nullptr || lane >= 4) continue;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = first_row + 8 * i + 2 * lane + j;
      if (column >= tile.rows) continue;
      arguments.log_sum_exp[tile.token(column) * arguments.query_heads + tile.query_head(column)] =
          attention.log_sum_exp(i, j);
    }
  }
}

}  // namespace kv
