// Which blocks of keys a tile of queries attends to, from the parts that decompose-attention estimates (Sparse Skeleton,
// section 3.3). Of 64 rows and a block of 64 keys, with lags that lie in two runs of 64,
//   score = max(largest slash of either run) + largest vertical of the block + largest horizontal of the rows
// is no less than slash[i - j] + vertical[j] + horizontal[i] of any of their elements. A tile takes the blocks whose score,
// the largest over its rows, is not below the threshold; those of sinks and of its diagonal it takes always.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

constexpr int32_t kSelectedBlockTokens = 64;

enum class SlashBound : int32_t {
  safe,   // the larger one of the two runs' maxima
  paper,  // their mean, as the paper has it, which some elements exceed
};

struct SelectKeyBlocksArguments {
  const float* slash = nullptr;       // [query_head, tokens], by lag
  const float* vertical = nullptr;    // [query_head, tokens]
  const float* horizontal = nullptr;  // [query_head, rows], of the sequence's last rows
  int32_t query_heads = 0;
  int32_t tokens = 0;
  int32_t rows = 0;

  int32_t tile_rows = 0;        // a multiple of 64
  int32_t sink_tokens = 0;      // S: their blocks are taken always
  int32_t diagonal_tokens = 1;  // T: so are those with any of a row's T nearest keys, itself the first
  int32_t dense_rows = 0;       // a tile with any of so many last rows takes all
  SlashBound bound = SlashBound::safe;

  // Natural logarithm. With a budget each head has its own: the largest that takes at least that share of the blocks
  // that its tiles see.
  float threshold = 0;
  bool by_budget = false;
  double budget = 0;

  // [query_head, tile, capacity] indices in units of 64 tokens, ascending, and [query_head, tile] how many are valid.
  // Blocks that hold what is NaN count as the largest, so they are taken.
  int32_t* key_blocks = nullptr;
  int32_t capacity = 0;  // at least the blocks of all tokens
  int32_t* counts = nullptr;

  constexpr int32_t tiles() const { return (rows + tile_rows - 1) / tile_rows; }
};

// Refuses sizes that contradict each other (invalid_value).
Status select_key_blocks(const SelectKeyBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
