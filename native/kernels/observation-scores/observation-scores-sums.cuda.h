// The denominators of a softmax over keys that arrive in tiles. A thread holds two rows of scores, in the accumulator
// layout of mma and wgmma: scores[4 * j + {0, 1}] belong to the first row, scores[4 * j + {2, 3}] to the second. The
// four lanes of a quad share these two rows. Device code.
#pragma once

#include <cmath>

#include "kernels/observation-scores/observation-scores-head.cuda.h"
#include "ptx/arithmetic.cuda.h"

namespace kv {

class RowSums {
 public:
  // `scale` is positive.
  __device__ explicit RowSums(float scale) : scale_log2_(scale * 1.44269504f) {}

  template <int kCount>
  __device__ void add(const float (&scores)[kCount]) {
    float sums[2];
    weigh(scores, sums);
    // Weights may grow far beyond 1 without loss. A new reference is needed only if they leave f32's range, or if
    // there is no reference yet.
    if (!(fmaxf(sums[0], sums[1]) <= kLargest) || sums[0] != sums[0] || sums[1] != sums[1]) {
      choose_references(scores);
      weigh(scores, sums);
    }
    sums_[0] += sums[0];
    sums_[1] += sums[1];
  }

  // The statistics of a row over all keys. All lanes of the quad get them.
  __device__ RowStatistics statistics(int row) const {
    RowStatistics all = {references_[row], sums_[row]};
    for (int distance = 1; distance < 4; distance *= 2) {
      all = merged(all, {__shfl_xor_sync(0xffffffffu, all.reference, distance),
                         __shfl_xor_sync(0xffffffffu, all.sum, distance)});
    }
    return all;
  }

 private:
  static constexpr float kLargest = 0x1p60f;

  template <int kCount>
  __device__ void weigh(const float (&scores)[kCount], float (&sums)[2]) const {
    float chains[2][2] = {};  // two chains for each row, so that additions do not wait for each other
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = i / 2 % 2;
      chains[row][i % 2] += ptx::exp2_approximate(fmaf(scores[i], scale_log2_, -references_[row]));
    }
    sums[0] = chains[0][0] + chains[0][1];
    sums[1] = chains[1][0] + chains[1][1];
  }

  template <int kCount>
  __device__ void choose_references(const float (&scores)[kCount]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float maximum = -INFINITY;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 2 % 2 == row) maximum = fmaxf(maximum, scores[i]);
      }
      // For a row that sees none of these keys, any finite reference is correct. The reference never falls, so that
      // sums do not overflow.
      const float reference = fmaxf(fmaxf(__fmul_ru(maximum, scale_log2_), kLowest), references_[row]);
      if (sums_[row] > 0) sums_[row] *= ptx::exp2_approximate(references_[row] - reference);
      references_[row] = reference;
    }
  }

  static constexpr float kLowest = -1e30f;

  float scale_log2_;
  float references_[2] = {-INFINITY, -INFINITY};
  float sums_[2] = {};
};

}  // namespace kv
