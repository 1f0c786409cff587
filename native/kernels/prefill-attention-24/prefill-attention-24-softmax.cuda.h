// Softmax over keys that arrive in tiles. Scores are the accumulators of S^T = K Q^T: a thread's scores [key tile,
// row tile, i] belong to its rows 2 * rowTile + i % 2. The eight lanes with the same lane % 4 share these rows.
// Device code.
#pragma once

#include <cfloat>
#include <cmath>

#include "ptx/arithmetic.cuda.h"

namespace kv {

// Weights are exp(scale * score) relative to a reference of the row. The reference need not be the row's maximum: it
// moves only if weights would grow large. Maxima are therefore computed for the first keys of a row, and seldom after
// that.
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

  // Turns scores into weights and returns true. If some weights are too large, it returns false in every lane of the
  // warp: `raise` must then get the same scores before they are weighed again.
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

  // For rows whose weights were too large, moves the reference to the maximum of these scores. What row r accumulated
  // must then be multiplied by correction[r].
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
      // Rounded up. Otherwise the weights of large scores could exceed 1 by any factor, and be raised without end.
      maximum = __fmul_ru(maximum, scale_log2_);
      const bool raised = raised_rows_ >> row & 1;
      correction[row] = raised ? ptx::exp2_approximate(reference_[row] - maximum) : 1.0f;
      if (raised) reference_[row] = maximum;
      sum_[row] *= correction[row];
    }
    raised_rows_ = 0;
  }

  // Adds up the sums of the lanes. Must be called once, after the last tile.
  __device__ void finish() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      for (int distance = 4; distance < 32; distance *= 2) {
        sum_[row] += __shfl_xor_sync(kFullWarp, sum_[row], distance);
      }
    }
  }

  // The factor that turns accumulated outputs into the mean. 0 if no key was seen, NaN if a score was NaN.
  __device__ float normalizer(int row) const { return sum_[row] == 0.0f ? 0.0f : 1.0f / sum_[row]; }

  // Natural logarithm of the sum of exp(scale * score). Minus infinity if no key was seen.
  __device__ float log_sum_exp(int row) const { return (reference_[row] + log2f(sum_[row])) * kLn2; }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kLn2 = 0.693147181f;
  // The largest sum of a lane's weights of one row in one tile. Weights up to 2^8 are as exact as weights up to 1.
  static constexpr float kLargest = 256.0f;
  // The reference of a row that has seen no key. It is finite and so low that weights of scores are infinite; those
  // of the lowest score are 1.
  static constexpr float kNothing = -FLT_MAX;

  float scale_log2_;
  float reference_[kRows];  // exponents of 2
  float sum_[kRows];        // this lane's part of the sum
  uint32_t raised_rows_ = 0;
};

}  // namespace kv
