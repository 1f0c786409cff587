// One tile of queries: its rows, what they see, and where its scores go. The numbers are the same on every device.
#pragma once

#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {
namespace KV_ISA {

// The functions are constexpr, so that a CUDA device may evaluate them too.
struct ScoredTile {
  int64_t query_head;
  int64_t kv_head;
  int32_t tokens;     // keys of the sequence
  int32_t position;   // of the tile's first row
  int64_t first_row;  // of the tile, in `query`
  int32_t rows;
  const int32_t* blocks;  // of the kv head
  float* scores;

  constexpr ScoredTile(const PrefillBlockScoresArguments& a, int64_t head, int32_t tile)
      : query_head(head),
        kv_head(head / a.group()),
        tokens(a.key_counts[int64_t{a.slots[0]} * a.kv_heads + kv_head]),
        position(tokens - (a.query_start[1] - a.query_start[0]) + tile * kScoredTileRows),
        first_row(int64_t{a.query_start[0]} + int64_t{tile} * kScoredTileRows),
        rows(tokens - position < kScoredTileRows ? tokens - position : kScoredTileRows),
        blocks(a.block_table + (int64_t{a.slots[0]} * a.kv_heads + kv_head) * a.table_width),
        scores(a.scores + (head * a.tiles + tile) * a.blocks) {}

  // How many blocks row `row` of the tile sees the first key of.
  constexpr int32_t seen_by(int32_t row) const { return (position + row) / kScoredBlockKeys + 1; }
  constexpr int32_t seen() const { return seen_by(rows - 1); }
};

// Elements ahead of a key, and of a query.
constexpr int64_t key_offset(const PrefillBlockScoresArguments& a, const int32_t* blocks, int32_t key) {
  return blocks[key / a.block_tokens] * a.block_stride + key % a.block_tokens * a.token_stride;
}
constexpr int64_t query_offset(const PrefillBlockScoresArguments& a, int64_t row, int64_t query_head) {
  return row * a.query_token_stride + query_head * a.query_head_stride;
}

template <class T>
constexpr const T* key_at(const PrefillBlockScoresArguments& a, const int32_t* blocks, int32_t key) {
  return static_cast<const T*>(a.keys) + key_offset(a, blocks, key);
}

template <class T>
constexpr const T* query_at(const PrefillBlockScoresArguments& a, int64_t row, int64_t query_head) {
  return static_cast<const T*>(a.query) + query_offset(a, row, query_head);
}

}  // namespace KV_ISA
}  // namespace kv
