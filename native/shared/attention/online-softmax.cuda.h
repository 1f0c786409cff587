// Softmax over keys that arrive in tiles. A thread holds two rows of scores, in the accumulator layout of mma and
// wgmma: scores[4 * j + {0, 1}] belong to the first row, scores[4 * j + {2, 3}] to the second. The four lanes of a
// quad share these two rows. Device code.
#pragma once

#include <cmath>

#include "ptx/arithmetic.cuda.h"

namespace kv {

class OnlineSoftmax {
 public:
  // `scale` is positive. Weights are exp(scale * score), up to a factor that is the same for a whole row.
  __device__ explicit OnlineSoftmax(float scale) : scale_log2_(scale * kLog2E) {}

  // Takes a tile of scores into account. What row r accumulated over earlier tiles must then be multiplied by
  // correction[r]. Returns whether any correction in this warp differs from 1.
  template <int kCount>
  __device__ bool observe(const float (&scores)[kCount], float (&correction)[2]) {
    constexpr int kChains = 4;  // chains of comparisons in each row, so that they do not wait for each other
    float maxima[2][kChains];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& maximum = maxima[row_of(i)][(i / 4 * 2 + i % 2) % kChains];
      maximum = i < 2 * kChains ? scores[i] : fmaxf(maximum, scores[i]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float maximum = fmaxf(fmaxf(maxima[row][0], maxima[row][1]), fmaxf(maxima[row][2], maxima[row][3]));
      maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 2));
      // Rounded up. Otherwise the weights of large scores could exceed 2^8 by any factor.
      maximum = __fmul_ru(maximum, scale_log2_);
      // The reference may stay below the maximum: weights up to 2^8 are as exact as weights up to 1. Outputs then
      // need a correction only when the maximum grows a lot.
      const bool moves = maximum > reference_[row] + kSlack;
      correction[row] = moves ? ptx::exp2_approximate(reference_[row] - maximum) : 1.0f;
      if (moves) reference_[row] = maximum;
      sum_[row] *= correction[row];
    }
    return __any_sync(kFullWarp, correction[0] != 1.0f || correction[1] != 1.0f);
  }

  // Turns the scores kBegin .. kEnd - 1 of the tile observed last into weights.
  template <int kBegin, int kEnd, int kCount>
  __device__ void weigh(float (&scores)[kCount]) {
    const float offset[2] = {reference_[0] == kNothing ? 0.0f : reference_[0],
                             reference_[1] == kNothing ? 0.0f : reference_[1]};
#pragma unroll
    for (int i = kBegin; i < kEnd; i += 2) {
      scores[i] = ptx::exp2_approximate(fmaf(scores[i], scale_log2_, -offset[row_of(i)]));
      scores[i + 1] = ptx::exp2_approximate(fmaf(scores[i + 1], scale_log2_, -offset[row_of(i)]));
      sum_[row_of(i)] += scores[i] + scores[i + 1];
    }
  }

  // Adds up the sums of the four lanes of a quad. Must be called once, after the last tile.
  __device__ void finish() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum_[row] += __shfl_xor_sync(kFullWarp, sum_[row], 1);
      sum_[row] += __shfl_xor_sync(kFullWarp, sum_[row], 2);
    }
  }

  // The factor that turns accumulated outputs into the mean. 0 if no key was seen, NaN if a score was NaN.
  static __device__ float normalizer(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

  // Weights of row r are 2^(scale * log2(e) * score - reference(r)). Their sum is sum(r).
  __device__ float reference(int row) const { return reference_[row]; }
  __device__ float sum(int row) const { return sum_[row]; }

  // Natural logarithm of the sum of exp(scale * score). Minus infinity if no key was seen.
  static __device__ float log_sum_exp(float reference, float sum) { return (reference + log2f(sum)) * kLn2; }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kLn2 = 0.693147181f;
  static constexpr float kSlack = 8.0f;
  static constexpr float kNothing = -INFINITY;  // the maximum of no scores

  static __device__ constexpr int row_of(int i) { return (i >> 1) & 1; }

  float scale_log2_;
  float reference_[2] = {kNothing, kNothing};  // an exponent of 2
  float sum_[2] = {0.0f, 0.0f};
};

}  // namespace kv
