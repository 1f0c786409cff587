// Of the rows of some tiles, the logits of all blocks: kept in device memory until the rows' denominators are known, and
// then made into the tiles' mean shares. Logits are base 2 here.
#pragma once

#include "shared/prefill-block-scores/prefill-block-scores.cuda.h"
#include "shared/prefill-block-scores/tile-products.cuda.h"

namespace kv {
namespace prefill_block_scores {

// A tile is kRowsOfTile rows.
template <class Tile, int kRowsOfTile>
struct RowLogits {
  static constexpr int kRows = Tile::kRows;
  static constexpr float kLowest = -1e30f;  // finite, so that infinities are never subtracted

  float* memory;  // [block, row]
  LogSum of_rows[2] = {{kLowest, 0}, {kLowest, 0}};  // of this thread's blocks

  __device__ explicit RowLogits(float* room) : memory(room) {}

  // The logits of a block, of this thread's rows.
  __device__ void add(int block, const float (&logits)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      memory[int64_t{block} * kRows + Tile::row_of(half)] = logits[half];
      LogSum& of_row = of_rows[half];
      const float above = logits[half] - of_row.peak;
      const float factor = ptx::exp2_approximate(-fabsf(above));
      of_row.sum = above > 0 ? fmaf(of_row.sum, factor, 1.0f) : of_row.sum + factor;
      of_row.peak = ptx::larger_or_nan(of_row.peak, logits[half]);
    }
  }

  // Writes the scores of `tiles` tiles or fewer, of blocks before `end`, when all logits have been added. `rows` of the
  // rows are real. All threads must be done with what `denominators` is of, kRows numbers of shared memory.
  __device__ void write_scores(float* denominators, const PrefillBlockScoresArguments& a, float* scores, int tiles, int rows, int end) {
    share_denominators(denominators, rows);
    const int own = Tile::lane() * 4;
    for (int group = 0; group < kRows && group < rows; group += 4 * kWarp) {
      const float4 of_rows = *reinterpret_cast<const float4*>(denominators + group + own);
      const int tile = (group + own) / kRowsOfTile;
      const float rows_of_tile = logf(static_cast<float>(max(1, min(kRowsOfTile, rows - tile * kRowsOfTile))));
      const bool writes = own % kRowsOfTile == 0 && tile < tiles;
      for (int first = Tile::warp() * kTogether; first < end; first += Tile::kThreads / kWarp * kTogether) {
        float4 logits[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          logits[i] = *reinterpret_cast<const float4*>(memory + int64_t{min(first + i, end - 1)} * kRows + group + own);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float shares[4] = {logits[i].x - of_rows.x, logits[i].y - of_rows.y, logits[i].z - of_rows.z,
                                   logits[i].w - of_rows.w};
          const float score = sum_of<kRowsOfTile / 4 - 1>(shares).natural() - rows_of_tile;
          if (writes && first + i < end) scores[int64_t{tile} * a.blocks + first + i] = score;
        }
      }
    }
    for (int tile = 0; tile < min(kRows / kRowsOfTile, tiles); ++tile) {
      for (int block = end + static_cast<int>(threadIdx.x); block < a.blocks; block += Tile::kThreads) {
        scores[int64_t{tile} * a.blocks + block] = -INFINITY;
      }
    }
  }

 private:
  static constexpr int kTogether = 8;  // blocks whose logits are read at a time

  __device__ void share_denominators(float* denominators, int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak = of_rows[half].peak;
      for (int bit = 1; bit < 4; bit *= 2) peak = ptx::larger_or_nan(peak, __shfl_xor_sync(0xffffffffu, peak, bit));
      float sum = of_rows[half].sum * ptx::exp2_approximate(of_rows[half].peak - peak);
      for (int bit = 1; bit < 4; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
      const int row = Tile::row_of(half);
      // An infinite logit leaves nothing known.
      if (Tile::pair() == 0) denominators[row] = row < rows ? peak + log2f(sum) + 0.0f * peak : 0.0f;
    }
    __syncthreads();
  }
};

}  // namespace prefill_block_scores
}  // namespace kv
