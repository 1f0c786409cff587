// Softmax over keys that arrive in tiles, where scores are the accumulators of S^T = K Q^T: a thread's scores
// [key tile, row tile, i] belong to its rows 2 * rowTile + i % 2, and the eight lanes of one lane % 4 share these.
// Device code.
#pragma once

#include <cfloat>
#include <cmath>

#include "ptx/arithmetic.cuda.h"

namespace kv {

// Weights are exp(scale * score) relative to a reference of the row that need not be its maximum: it moves only when
// weights would grow large. So maxima are taken at the first keys of a row and seldom after.
template <int kRows>
class PrefillSoftmax24 {
 public:
  // `scale` is positive.
  __device__ explicit PrefillSoftmax24(float scale) : scale_log2_(scale * kLog2E) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      reference_[row] = kNothing;
      sum_[row] = 0.0f;
    }
  }

  // Turns scores into weights and returns true, or false when some are too large, in every lane of the warp: then
  // `raise` is to see the same scores before they are weighed again.
  template <int kKeyTiles>
  __device__ __forceinline__ bool weigh(float (&scores)[kKeyTiles][kRows / 2][4]) {
    float added[kRows];
    float largest = 0.0f;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      added[row] = 0.0f;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        float* pair = &scores[tile][row / 2][row % 2];
        pair[0] = ptx::exp2_approximate(fmaf(pair[0], scale_log2_, -reference_[row]));
        pair[2] = ptx::exp2_approximate(fmaf(pair[2], scale_log2_, -reference_[row]));
        added[row] += pair[0] + pair[2];
      }
      largest = fmaxf(largest, added[row]);
    }
    if (__any_sync(kFullWarp, largest > kLargest)) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) raised_rows_ |= (added[row] > kLargest) << row;
      return false;
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) sum_[row] += added[row];
    return true;
  }

  // Moves the references of rows whose weights were too large to the maximum of these scores. What was accumulated for
  // row r must be multiplied by correction[r].
  template <int kKeyTiles>
  __device__ void raise(const float (&scores)[kKeyTiles][kRows / 2][4], float (&correction)[kRows]) {
    for (int distance = 4; distance < 32; distance *= 2) {
      raised_rows_ |= __shfl_xor_sync(kFullWarp, raised_rows_, distance);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float maximum = scores[0][row / 2][row % 2];
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        const float* pair = &scores[tile][row / 2][row % 2];
        maximum = fmaxf(maximum, fmaxf(pair[0], pair[2]));
      }
      for (int distance = 4; distance < 32; distance *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, distance));
      }
      // Rounded up, or the weights of large scores could pass 1 by any factor, and be raised without end.
      maximum = __fmul_ru(maximum, scale_log2_);
      const bool raised = raised_rows_ >> row & 1;
      correction[row] = raised ? ptx::exp2_approximate(reference_[row] - maximum) : 1.0f;
      if (raised) reference_[row] = maximum;
      sum_[row] *= correction[row];
    }
    raised_rows_ = 0;
  }

  // Adds up the lanes' shares; call once, after the last tile.
  __device__ void finish() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      for (int distance = 4; distance < 32; distance *= 2) {
        sum_[row] += __shfl_xor_sync(kFullWarp, sum_[row], distance);
      }
    }
  }

  // What turns accumulated outputs into the mean; 0 where no key was seen, NaN where a score was NaN.
  __device__ float normalizer(int row) const { return sum_[row] == 0.0f ? 0.0f : 1.0f / sum_[row]; }

  // Natural log of the sum of exp(scale * score); minus infinity where no key was seen.
  __device__ float log_sum_exp(int row) const { return (reference_[row] + log2f(sum_[row])) * kLn2; }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kLn2 = 0.693147181f;
  // Of a lane's weights of a row in one tile, added up. Weights up to 2^8 are as exact as weights up to 1.
  static constexpr float kLargest = 256.0f;
  // Finite, and so low that the weights of scores are infinite, of the lowest ones 1.
  static constexpr float kNothing = -FLT_MAX;

  float scale_log2_;
  float reference_[kRows];  // in powers of two
  float sum_[kRows];        // this lane's share
  uint32_t raised_rows_ = 0;
};

}  // namespace kv
