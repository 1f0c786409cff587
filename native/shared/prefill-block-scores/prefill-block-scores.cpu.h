// Makes logarithms of sums into scores.
#pragma once

#include "shared/cpu/simd.cpu.h"
#include "shared/prefill-block-scores/scored-tile.h"

namespace kv {
namespace KV_ISA {

// The scores of the blocks that the tile sees are logarithms up to a number that all have in common. Subtracts the
// logarithm of their sum, and writes minus infinity for all other blocks.
inline void normalise(const PrefillBlockScoresArguments& a, const ScoredTile& tile) {
  const int32_t seen = tile.seen();
  float peak = -__builtin_inff();
  for (int32_t block = 0; block < seen; ++block) peak = tile.scores[block] > peak ? tile.scores[block] : peak;
  float sum = 0;
  for (int32_t block = 0; block < seen; ++block) sum += exponential(splat(tile.scores[block] - peak))[0];
  const float total = peak + __builtin_logf(sum);
  for (int32_t block = 0; block < a.blocks; ++block) {
    tile.scores[block] = block < seen ? tile.scores[block] - total : -__builtin_inff();
  }
}

}  // namespace KV_ISA
}  // namespace kv
