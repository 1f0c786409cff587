// Chooses the blocks of keys that a tile of queries attends to, by an estimate of how much of the attention falls on
// each block. An estimate is one of three:
// - Scores of tiles and blocks, each the logarithm of the share of the tile's attention that falls on the block.
// - The parts that decompose-attention finds (Sparse Skeleton, section 3.3). The lags between 64 rows and a block of 64
//   keys lie in two runs of 64. The score
//     score = max(largest slash of either run) + largest vertical of the block + largest horizontal of the rows
//   is no less than slash[i - j] + vertical[j] + horizontal[i] of any element. The score of a tile is the largest over
//   its rows.
// - None. Then all scores are minus infinity.
// A tile takes blocks by a rule, of equal scores those of lower heads, tiles and numbers. It always takes the blocks of
// sinks and of its diagonal.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

constexpr int32_t kSelectedBlockTokens = 64;

enum class SlashBound : int32_t {
  safe,   // the larger of the two runs' maxima
  paper,  // the mean of the two maxima, as in the paper; some elements exceed it
};

// Which blocks a tile takes besides those that it always takes.
enum class BlockRule : int32_t {
  threshold,  // those whose score is not below the threshold
  budget,     // the best ones of all heads, so that all that are taken are this share of what the tiles see: heads that
              // need more blocks take more
  mass,       // its best ones, as few as hold this share of its estimated attention with those that it always takes
  of_max,     // those whose score is not below its largest one and the threshold together
};

struct SelectKeyBlocksArguments {
  const float* scores = nullptr;  // [query_head, tile, block of all tokens], or the three parts instead, or neither:
  const float* slash = nullptr;       // [query_head, tokens], by lag
  const float* vertical = nullptr;    // [query_head, tokens]
  const float* horizontal = nullptr;  // [query_head, rows], of the sequence's last rows
  int32_t query_heads = 0;
  int32_t tokens = 0;
  int32_t rows = 0;

  int32_t tile_rows = 0;        // a multiple of 64
  int32_t sink_tokens = 0;      // S: blocks with sinks are always taken
  int32_t diagonal_tokens = 1;  // T: so are blocks with any of a row's T nearest keys, its own included
  int32_t dense_rows = 0;       // a tile with any of these last rows takes all blocks
  SlashBound bound = SlashBound::safe;

  BlockRule rule = BlockRule::threshold;  // mass and of_max need scores
  float threshold = 0;                    // natural logarithm
  double share = 0;                       // of a budget, or of the mass
  // Of each query head, this many numbers apart: how many blocks another tile took. If given, the share of a budget does
  // not count: on average a tile takes as many, all heads together, but for those of dense rows.
  const int32_t* tile_blocks = nullptr;
  int64_t tile_blocks_stride = 0;

  // [query_head, tile, capacity]: numbers of key blocks, ascending. `counts`, [query_head, tile], says how many are
  // valid. NaN counts as the largest number, so blocks with NaN are taken.
  int32_t* key_blocks = nullptr;
  int32_t capacity = 0;  // at least the number of blocks of all tokens
  int32_t* counts = nullptr;

  constexpr int32_t tiles() const { return (rows + tile_rows - 1) / tile_rows; }
  constexpr int64_t lists() const { return int64_t{query_heads} * tiles(); }
};

// Refuses sizes that contradict each other (invalid_value).
Status select_key_blocks(const SelectKeyBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
