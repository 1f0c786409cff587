// Lists of the key blocks that query rows attend to, one for each query head and query tile.
//
// A query tile is kListedQueryTile rows of one batch entry that follow each other. Every entry begins a new tile, and
// the tiles of the entries follow one another. A key block is kKeyBlockTokens keys that follow each other in the
// sequence, however the cache is paged.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/fault.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

constexpr int kListedQueryTile = 128;
constexpr int kKeyBlockTokens = 64;

struct KeyBlockLists {
  // [query_head, query_tile, listed_block]: numbers of key blocks, ascending, below key_block_limit of the tile.
  const int32_t* blocks = nullptr;
  // [query_head, query_tile]: how many blocks are listed, at most `capacity`.
  const int32_t* counts = nullptr;
  int32_t query_tiles = 0;  // at least those of the batch
  int32_t capacity = 0;

  constexpr int64_t list(int64_t query_head, int64_t query_tile) const {
    return query_head * query_tiles + query_tile;
  }
  // 0 of a tile that has no list.
  constexpr int32_t count(int64_t query_head, int64_t query_tile) const {
    return query_tile < query_tiles ? counts[list(query_head, query_tile)] : 0;
  }
  constexpr const int32_t* blocks_of(int64_t list) const { return blocks + list * capacity; }
};

// The tiles of `rows` rows of one batch entry.
constexpr int32_t query_tiles_of(int32_t rows) { return rows / kListedQueryTile + (rows % kListedQueryTile != 0); }

// How many key blocks, from the first on, hold a key that the last row of a tile sees. `first_query` is the tile's first
// of the entry's `queries` rows.
constexpr int32_t key_block_limit(bool causal, int32_t key_count, int32_t queries, int32_t first_query) {
  const int32_t rows_behind = queries - first_query > kListedQueryTile ? queries - first_query - kListedQueryTile : 0;
  const int32_t visible = causal ? key_count - rows_behind : key_count;
  return visible > 0 ? (visible - 1) / kKeyBlockTokens + 1 : 0;
}

// Whether the lists of the batch's tiles are as described above. Reads the lists, and tables that were validated: for
// devices whose memory the host reads.
Status validate_key_block_lists(const PagedAttentionArguments& arguments, const KeyBlockLists& lists);

// What the check on a CUDA device may find.
enum class KeyBlockListFault : int32_t {
  list = 1,             // value: the query head; row: the query tile; limit: key_block_limit
  too_few_query_tiles,  // value: the batch's tiles; limit: those that have lists
};

std::string describe_key_block_list_fault(const Fault& fault);

}  // namespace kv
