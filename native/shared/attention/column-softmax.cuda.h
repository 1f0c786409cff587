// Softmax over keys that are the rows of a product, and queries its columns. Device code.
#pragma once

#include <cmath>

#include "ptx/arithmetic.cuda.h"

namespace kv {

// Softmax over keys that arrive in tiles. A thread holds two columns of each tile of transposed scores, in the
// accumulator layout of mma: element i of a tile belongs to column i % 2. Eight lanes share a column.
template <int kColumnTiles>
class ColumnSoftmax {
 public:
  // `scale` is positive. Weights are exp(scale * score), up to a factor that is the same for a whole column.
  __device__ explicit ColumnSoftmax(float scale) : scale_log2_(scale * kLog2E) { clear(); }

  // Forgets all tiles.
  __device__ void clear() {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      reference_[column] = -INFINITY;
      sum_[column] = 0.0f;
    }
  }

  // Takes tiles of scores into account. What a column accumulated must then be multiplied by its correction. Returns
  // whether any correction in this warp differs from 1; if none does, no correction is written.
  template <int kRowTiles>
  __device__ bool observe(const float (&scores)[kRowTiles][kColumnTiles][4], float (&correction)[2 * kColumnTiles]) {
    float maximum[kColumns];
    bool moves = false;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int tile = column / 2;
      const int i = column % 2;
      maximum[column] = fmaxf(scores[0][tile][i], scores[0][tile][i + 2]);
#pragma unroll
      for (int row = 1; row < kRowTiles; ++row) {
        maximum[column] = fmaxf(maximum[column], fmaxf(scores[row][tile][i], scores[row][tile][i + 2]));
      }
      // Rounded up. Otherwise the weights of large scores could exceed 2^8 by any factor.
      maximum[column] = __fmul_ru(maximum[column], scale_log2_);
      // The reference may stay below the maximum: weights up to 2^8 are as exact as weights up to 1.
      moves = moves || maximum[column] > reference_[column] + kSlack;
    }
    if (!__any_sync(kFullWarp, moves)) return false;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      for (int distance = 4; distance < 32; distance *= 2) {
        maximum[column] = fmaxf(maximum[column], __shfl_xor_sync(kFullWarp, maximum[column], distance));
      }
      const bool own_moves = maximum[column] > reference_[column] + kSlack;
      correction[column] = own_moves ? ptx::exp2_approximate(reference_[column] - maximum[column]) : 1.0f;
      if (own_moves) reference_[column] = maximum[column];
      sum_[column] *= correction[column];
    }
    return true;
  }

  // Turns the scores that were observed last into weights.
  template <int kRowTiles>
  __device__ void weigh(float (&scores)[kRowTiles][kColumnTiles][4]) {
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const float offset = reference_[column] == -INFINITY ? 0.0f : reference_[column];
      float* sum = &sum_[column];
#pragma unroll
      for (int row = 0; row < kRowTiles; ++row) {
        float* pair = &scores[row][column / 2][column % 2];
        pair[0] = ptx::exp2_approximate(fmaf(pair[0], scale_log2_, -offset));
        pair[2] = ptx::exp2_approximate(fmaf(pair[2], scale_log2_, -offset));
        *sum += pair[0] + pair[2];
      }
    }
  }

  // Adds up the sums of the lanes. Must be called once, after the last tile.
  __device__ void finish() {
#pragma unroll
    for (float& sum : sum_) {
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
    }
  }

  // Like OnlineSoftmax's, for column column % 2 of tile column / 2.
  __device__ float reference(int column) const { return reference_[column]; }
  __device__ float sum(int column) const { return sum_[column]; }

 private:
  static constexpr int kColumns = 2 * kColumnTiles;  // of each thread
  static constexpr unsigned kFullWarp = 0xffffffffu;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kSlack = 8.0f;

  float scale_log2_;
  float reference_[kColumns];  // exponents of 2
  float sum_[kColumns];
};

}  // namespace kv
