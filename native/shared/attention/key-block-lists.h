// Lists of the key blocks that query rows attend to, one list for each query head and query tile.
//
// A query tile is kListedQueryTile consecutive rows of one batch entry. Every entry begins a new tile, and the tiles
// of all entries are numbered one after another. A key block is kKeyBlockTokens consecutive keys of the sequence,
// however the cache is paged.
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
  // [query_head, query_tile, listed_block]: numbers of key blocks, ascending, less than key_block_limit of the tile.
  const int32_t* blocks = nullptr;
  // [query_head, query_tile]: how many blocks are listed, at most `capacity`.
  const int32_t* counts = nullptr;
  int32_t query_tiles = 0;  // at least the number of the batch's tiles
  int32_t capacity = 0;

  constexpr int64_t list(int64_t query_head, int64_t query_tile) const {
    return query_head * query_tiles + query_tile;
  }
  // 0 for a tile that has no list.
  constexpr int32_t count(int64_t query_head, int64_t query_tile) const {
    return query_tile < query_tiles ? counts[list(query_head, query_tile)] : 0;
  }
  constexpr const int32_t* blocks_of(int64_t list) const { return blocks + list * capacity; }
};

// The number of tiles of `rows` rows of one batch entry.
constexpr int32_t query_tiles_of(int32_t rows) { return rows / kListedQueryTile + (rows % kListedQueryTile != 0); }

// How many of the first key blocks hold a key that the last row of a tile sees. `first_query` is the tile's first row
// among the entry's `queries` rows.
constexpr int32_t key_block_limit(bool causal, int32_t key_count, int32_t queries, int32_t first_query) {
  const int32_t rows_behind = queries - first_query > kListedQueryTile ? queries - first_query - kListedQueryTile : 0;
  const int32_t visible = causal ? key_count - rows_behind : key_count;
  return visible > 0 ? (visible - 1) / kKeyBlockTokens + 1 : 0;
}

// Checks that the lists of the batch's tiles are as described above. Reads the lists and validated tables, so it is
// for devices whose memory the host reads.
Status validate_key_block_lists(const PagedAttentionArguments& arguments, const KeyBlockLists& lists);

// What the check on a CUDA device may find wrong.
enum class KeyBlockListFault : int32_t {
  list = 1,             // value: the query head; row: the query tile; limit: key_block_limit
  too_few_query_tiles,  // value: the batch's tiles; limit: the tiles that have lists
};

std::string describe_key_block_list_fault(const Fault& fault);

}  // namespace kv
