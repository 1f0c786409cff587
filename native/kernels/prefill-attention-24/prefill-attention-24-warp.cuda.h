// Attention of 24 query rows by one warp over blocks of 64 keys, dense or 2:4 sparse (sm_80). Device code.
//
// Everything is transposed: scores S^T = K Q^T are [key, row], outputs O^T = V^T P^T are [dim, row]. Keys and values
// are then the operand of mma that may be sparse. Queries stay in registers.
#pragma once

#include <cstdint>

#include "kernels/prefill-attention-24/prefill-attention-24-softmax.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/matrix-transpose.cuda.h"
#include "ptx/mma-sparse.cuda.h"
#include "ptx/mma.cuda.h"
#include "shared/attention/warp-attention.cuda.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// The keys or the values of a block in shared memory. Panels have 64 columns, which are 128 bytes. 16-byte chunks are
// swizzled.
template <typename Element, int kHeadDim>
struct alignas(1024) BlockStage24 {
  union {
    Element dense[kHeadDim / 64][kBlock24Tokens][64];              // [panel, token, dim]
    Element sparse_keys[kBlock24Tokens][kHeadDim / 2];             // [token, kept dim]
    Element sparse_values[kHeadDim / 64][kBlock24Tokens / 2][64];  // [panel, kept token, dim]
  };
  uint32_t metadata[kHeadDim * 2];  // laid out as in blocks-24.h
};

template <typename Element, int kDim>
class PrefillWarp24 {
 public:
  using Stage = BlockStage24<Element, kDim>;
  static constexpr int kHeadDim = kDim;
  static constexpr int kRowTiles = 3;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kKeyTiles = kBlock24Tokens / 16;

  __device__ explicit PrefillWarp24(float scale) : softmax_(scale), lane_(threadIdx.x % 32) {}

  // Sets row 8 * tile + lane / 4. A null query means a row of zeros.
  __device__ void set_query(int tile, const Element* query) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      query_[tile][i] =
          query != nullptr ? *reinterpret_cast<const uint32_t*>(query + i * 8 + lane_ % 4 * 2) : 0;
    }
  }

  // Computes the scores of a block's keys.
  __device__ __forceinline__ void score(Stage& block, bool sparse) {
#pragma unroll
    for (int i = 0; i < kKeyTiles * kRowTiles * 4; ++i) (&scores_[0][0][0])[i] = 0.0f;
    const int row = lane_ % 16;
    if (sparse) {
#pragma unroll
      for (int step = 0; step < kHeadDim / 32; ++step) {
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; ++tile) {
          uint32_t keys[4];
          ptx::load_matrices(keys, sparse_keys_chunk(block, row + 16 * tile, 2 * step + lane_ / 16));
          const uint32_t metadata = block.metadata[(tile * 32 + lane_) * (kHeadDim / 64) + step / 2];
#pragma unroll
          for (int rows = 0; rows < kRowTiles; ++rows) {
            multiply_sparse(scores_[tile][rows], keys, &query_[rows][4 * step], metadata, step % 2);
          }
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; ++tile) {
          uint32_t keys[4];
          ptx::load_matrices(keys, swizzled_chunk(block.dense[step / 4], row + 16 * tile, step % 4 * 2 + lane_ / 16));
#pragma unroll
          for (int rows = 0; rows < kRowTiles; ++rows) {
            ptx::mma_m16n8k16<Element>(scores_[tile][rows], keys, query_[rows][2 * step], query_[rows][2 * step + 1]);
          }
        }
      }
    }
  }

  // Hides keys of the block that was scored last: row 8 * tile + lane % 4 * 2 + i sees its first `seen[2 * tile + i]`
  // keys.
  __device__ void mask(const int (&seen)[2 * kRowTiles]) {
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int rows = 0; rows < kRowTiles; ++rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = 16 * tile + i / 2 * 8 + lane_ / 4;
          if (key >= seen[2 * rows + i % 2]) scores_[tile][rows][i] = -INFINITY;
        }
      }
    }
  }

  // Turns the scores into weights and returns true. If weights would be too large, it returns false: the caller must
  // then score the same block again, call `raise`, and weigh.
  __device__ __forceinline__ bool weigh() {
    if (!softmax_.weigh(scores_)) return false;
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
      for (int rows = 0; rows < kRowTiles; ++rows) {
        const float* weight = scores_[tile][rows];
        weights_[2 * tile][rows] = ptx::transpose_matrix(ptx::pack<Element>(weight[0], weight[1]));
        weights_[2 * tile + 1][rows] = ptx::transpose_matrix(ptx::pack<Element>(weight[2], weight[3]));
      }
    }
    return true;
  }

  __device__ void raise() {
    float correction[2 * kRowTiles];
    softmax_.raise(scores_, correction);
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 16; ++tile) {
#pragma unroll
      for (int rows = 0; rows < kRowTiles; ++rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output_[tile][rows][i] *= correction[2 * rows + i % 2];
      }
    }
  }

  // Adds the block's values times their weights.
  __device__ __forceinline__ void accumulate(Stage& block, bool sparse) {
    const int matrix = lane_ / 8;
    const int row = matrix / 2 * 8 + lane_ % 8;
    if (sparse) {
#pragma unroll
      for (int step = 0; step < kKeyTiles / 2; ++step) {
#pragma unroll
        for (int tile = 0; tile < kHeadDim / 16; ++tile) {
          uint32_t values[4];
          ptx::load_matrices_transposed(
              values, swizzled_chunk(block.sparse_values[tile / 4], 16 * step + row, tile % 4 * 2 + matrix % 2));
          const uint32_t metadata = block.metadata[tile * 32 + lane_];
#pragma unroll
          for (int rows = 0; rows < kRowTiles; ++rows) {
            const uint32_t weights[4] = {weights_[4 * step][rows], weights_[4 * step + 1][rows],
                                         weights_[4 * step + 2][rows], weights_[4 * step + 3][rows]};
            multiply_sparse(output_[tile][rows], values, weights, metadata, step % 2);
          }
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kKeyTiles; ++step) {
#pragma unroll
        for (int tile = 0; tile < kHeadDim / 16; ++tile) {
          uint32_t values[4];
          ptx::load_matrices_transposed(
              values, swizzled_chunk(block.dense[tile / 4], 16 * step + row, tile % 4 * 2 + matrix % 2));
#pragma unroll
          for (int rows = 0; rows < kRowTiles; ++rows) {
            ptx::mma_m16n8k16<Element>(output_[tile][rows], values, weights_[2 * step][rows],
                                       weights_[2 * step + 1][rows]);
          }
        }
      }
    }
  }

  // Adds up the sums and divides the outputs by them. Must be called once, after the last block.
  __device__ void finish() {
    softmax_.finish();
#pragma unroll
    for (int rows = 0; rows < kRowTiles; ++rows) {
      const float normalizer[2] = {softmax_.normalizer(2 * rows), softmax_.normalizer(2 * rows + 1)};
#pragma unroll
      for (int tile = 0; tile < kHeadDim / 16; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output_[tile][rows][i] *= normalizer[i % 2];
      }
    }
  }

  // Dims 8 * i + lane % 4 * 2 and the next of row 8 * tile + lane / 4. All lanes must call it together.
  __device__ uint32_t output(int tile, int i) const {
    const float* pair = &output_[i / 2][tile][i % 2 * 2];
    return ptx::transpose_matrix(ptx::pack<Element>(pair[0], pair[1]));
  }

  // The log-sum-exp of row 8 * tile + lane % 4 * 2 + i.
  __device__ float log_sum_exp(int tile, int i) const { return softmax_.log_sum_exp(2 * tile + i); }

 private:
  // A row of keys has 128 bytes, or 64 in heads of 64 dims. The same chunk of any eight rows lies in different banks.
  static __device__ Element* sparse_keys_chunk(Stage& block, int row, int chunk) {
    const int swizzle = kHeadDim == 128 ? row % 8 : row / 2 % 4;
    return &block.sparse_keys[row][(chunk ^ swizzle) * 8];
  }

  // `selector` must be known at compile time.
  static __device__ __forceinline__ void multiply_sparse(float* d, const uint32_t (&a)[4], const uint32_t* b,
                                                         uint32_t metadata, int selector) {
    if (selector == 0) {
      ptx::mma_sparse_m16n8k32<Element, 0>(d, a, b, metadata);
    } else {
      ptx::mma_sparse_m16n8k32<Element, 1>(d, a, b, metadata);
    }
  }

  PrefillSoftmax24<2 * kRowTiles> softmax_;
  const int lane_;
  uint32_t query_[kRowTiles][kHeadDim / 8];
  float scores_[kKeyTiles][kRowTiles][4];
  uint32_t weights_[2 * kKeyTiles][kRowTiles];
  float output_[kHeadDim / 16][kRowTiles][4] = {};
};

}  // namespace kv
