// Attention of 16 query rows by one warp with mma (sm_80). Keys and values are tiles in shared memory, whose 16-byte
// chunks lie where swizzled_chunk says. Device code.
#pragma once

#include <cstdint>

#include "ptx/arithmetic.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/mma.cuda.h"
#include "shared/attention/online-softmax.cuda.h"

namespace kv {

// Puts the same chunk of eight neighbouring rows into different banks.
template <typename Element, int kRows, int kHeadDim>
__device__ Element* swizzled_chunk(Element (&rows)[kRows][kHeadDim], int row, int chunk) {
  return &rows[row][(chunk ^ (row % 8)) * 8];
}

// A thread holds two rows: row lane / 4 is `half` 0, row lane / 4 + 8 is `half` 1.
template <typename Element, int kHeadDim, int kKeys>
class WarpAttention {
 public:
  __device__ explicit WarpAttention(float scale) : softmax_(scale), lane_(threadIdx.x % 32) {}

  // A null query means a row of zeros.
  __device__ void set_row(int half, const Element* query, int visible_keys) {
    visible_[half] = visible_keys;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      query_[i / 2][i % 2 * 2 + half] =
          query != nullptr ? *reinterpret_cast<const uint32_t*>(query + i * 8 + lane_ % 4 * 2) : 0;
    }
  }

  // Adds the keys first_key .. first_key + kKeys - 1. `masked` must be true unless every row sees all of them.
  __device__ void step(Element (&keys)[kKeys][kHeadDim], Element (&values)[kKeys][kHeadDim], int first_key,
                       bool masked) {
    float scores[kKeys / 2] = {};
    const int matrix = lane_ / 8;
#pragma unroll
    for (int dim = 0; dim < kHeadDim / 16; ++dim) {
#pragma unroll
      for (int key = 0; key < kKeys; key += 16) {
        uint32_t fragment[4];
        ptx::load_matrices(fragment,
                           swizzled_chunk(keys, key + matrix / 2 * 8 + lane_ % 8, 2 * dim + matrix % 2));
        ptx::mma_m16n8k16<Element>(&scores[key / 2], query_[dim], fragment[0], fragment[1]);
        ptx::mma_m16n8k16<Element>(&scores[key / 2 + 4], query_[dim], fragment[2], fragment[3]);
      }
    }
    if (masked) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (first_key + i / 4 * 8 + lane_ % 4 * 2 + i % 2 >= visible_[i / 2 % 2]) scores[i] = -INFINITY;
      }
    }
    float correction[2];
    if (softmax_.observe(scores, correction)) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) output_[i] *= correction[i / 2 % 2];
    }
    softmax_.template weigh<0, kKeys / 2>(scores);
#pragma unroll
    for (int key = 0; key < kKeys; key += 16) {
      const float* weight = &scores[key / 2];
      const uint32_t weights[4] = {
          ptx::pack<Element>(weight[0], weight[1]), ptx::pack<Element>(weight[2], weight[3]),
          ptx::pack<Element>(weight[4], weight[5]), ptx::pack<Element>(weight[6], weight[7])};
#pragma unroll
      for (int dim = 0; dim < kHeadDim / 16; ++dim) {
        uint32_t fragment[4];
        ptx::load_matrices_transposed(
            fragment, swizzled_chunk(values, key + matrix % 2 * 8 + lane_ % 8, 2 * dim + matrix / 2));
        ptx::mma_m16n8k16<Element>(&output_[8 * dim], weights, fragment[0], fragment[1]);
        ptx::mma_m16n8k16<Element>(&output_[8 * dim + 4], weights, fragment[2], fragment[3]);
      }
    }
  }

  // Adds up the sums. Must be called once, after the last step.
  __device__ void finish() { softmax_.finish(); }

  __device__ const OnlineSoftmax& softmax() const { return softmax_; }

  // Columns 8 * i + lane % 4 * 2 and the next of a row, not normalised.
  __device__ float2 output(int half, int i) const {
    return make_float2(output_[4 * i + 2 * half], output_[4 * i + 2 * half + 1]);
  }

 private:
  OnlineSoftmax softmax_;
  const int lane_;
  int visible_[2];
  uint32_t query_[kHeadDim / 16][4];
  float output_[kHeadDim / 2] = {};
};

}  // namespace kv
