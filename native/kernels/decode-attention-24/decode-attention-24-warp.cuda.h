// Attention of a few query rows by one warp, over blocks of 64 keys and values in shared memory. Keys and values may
// each be dense or 2:4 sparse (HieraSparse, "Trans-Both"). S^T = K Q^T and O^T = V^T P^T, so that K and V are the
// operand that sparse tensor cores take compressed. Query rows are columns here, eight in a tile. Device code
// (sm_80).
#pragma once

#include <cstdint>

#include "ptx/arithmetic.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/matrix-transpose.cuda.h"
#include "ptx/mma-sparse.cuda.h"
#include "ptx/mma.cuda.h"
#include "shared/attention/column-softmax.cuda.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

constexpr int kHalfBlock24Tokens = kBlock24Tokens / 2;  // tokens of a piece of a dense block

// 32 rows of a dense block, or the non-zeros of a sparse block of values, in panels of 64 dims. The 16-byte chunks of
// a row are permuted like TMA's 128-byte swizzle.
template <typename Element, int kHeadDim>
struct Panels24 {
  Element panels[kHeadDim / 64][kHalfBlock24Tokens][64];

  __device__ const Element* chunk(int row, int chunk) const {
    return &panels[chunk / 8][row][((chunk % 8) ^ (row % 8)) * 8];
  }
};

template <typename Element, int kHeadDim>
struct SparseKeys {
  Element non_zeros[kBlock24Tokens][kHeadDim / 2];
  uint32_t metadata[kBlock24Tokens / 16][32][kHeadDim / 64];

  __device__ const Element* chunk(int row, int chunk) const {
    const int placed = chunk ^ (kHeadDim == 128 ? row % 8 : row / 2 % 4);
    return &non_zeros[row][placed * 8];
  }
};

template <typename Element, int kHeadDim>
struct SparseValues {
  Panels24<Element, kHeadDim> non_zeros;
  uint32_t metadata[kHeadDim / 16][32];
};

// Of each tile of query rows, a thread holds the scores and outputs of rows 2 * (lane % 4) and the next. For each
// block: score_… its keys, then weigh, then add_… its values.
template <typename Element, int kHeadDim, int kColumnTiles>
class DecodeWarp24 {
 public:
  __device__ explicit DecodeWarp24(float scale) : softmax_(scale), lane_(threadIdx.x % 32) {}

  // Forgets all blocks.
  __device__ void clear() {
    softmax_.clear();
#pragma unroll
    for (auto& tile : output_) {
#pragma unroll
      for (int i = 0; i < 4 * kColumnTiles; ++i) tile[i / 4][i % 4] = 0.0f;
    }
  }

  // Sets row lane / 4 of a tile. Null means a row of zeros.
  __device__ void set_query(int tile, const Element* query) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      query_[tile][i] = query != nullptr ? *reinterpret_cast<const uint32_t*>(query + i * 8 + lane_ % 4 * 2) : 0;
    }
  }

  // Sets how many keys a row sees: row column % 2 of this thread's rows in tile column / 2.
  __device__ void set_visible_keys(int column, int visible_keys) { visible_[column] = visible_keys; }

  __device__ void score_sparse(const SparseKeys<Element, kHeadDim>& keys) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      clear(tile);
      uint32_t metadata[kHeadDim / 64];
#pragma unroll
      for (int word = 0; word < kHeadDim / 64; ++word) metadata[word] = keys.metadata[tile][lane_][word];
#pragma unroll
      for (int word = 0; word < kHeadDim / 64; ++word) {
        uint32_t fragments[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::load_matrices(fragments[half], keys.chunk(16 * tile + lane_ % 16, 4 * word + 2 * half + lane_ / 16));
        }
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
          const uint32_t* query = &query_[column][8 * word];
          float* scores = scores_[tile][column];
          ptx::mma_sparse_m16n8k32<Element, 0>(scores, fragments[0], query, metadata[word]);
          ptx::mma_sparse_m16n8k32<Element, 1>(scores, fragments[1], query + 4, metadata[word]);
        }
      }
    }
  }

  template <int kHalf>
  __device__ void score_dense(const Panels24<Element, kHeadDim>& keys) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles / 2; ++tile) {
      clear(kHalf * kRowTiles / 2 + tile);
#pragma unroll
      for (int dim = 0; dim < kHeadDim / 16; ++dim) {
        uint32_t fragment[4];
        ptx::load_matrices(fragment, keys.chunk(16 * tile + lane_ % 16, 2 * dim + lane_ / 16));
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
          ptx::mma_m16n8k16<Element>(scores_[kHalf * kRowTiles / 2 + tile][column], fragment, query_[column][2 * dim],
                                     query_[column][2 * dim + 1]);
        }
      }
    }
  }

  // Turns the block's scores into weights. `masked` must be true unless all rows see all keys of the block, which
  // begins at first_key.
  __device__ void weigh(int first_key, bool masked) {
    if (masked) mask(first_key);
    float correction[2 * kColumnTiles];
    if (softmax_.observe(scores_, correction)) {
#pragma unroll
      for (auto& tile : output_) {
#pragma unroll
        for (int i = 0; i < 4 * kColumnTiles; ++i) tile[i / 4][i % 4] *= correction[i / 4 * 2 + i % 2];
      }
    }
    softmax_.weigh(scores_);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column) {
        const float* scores = scores_[tile][column];
        weights_[column][2 * tile] = ptx::transpose_matrix(ptx::pack<Element>(scores[0], scores[1]));
        weights_[column][2 * tile + 1] = ptx::transpose_matrix(ptx::pack<Element>(scores[2], scores[3]));
      }
    }
  }

  __device__ void add_sparse(const SparseValues<Element, kHeadDim>& values) {
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 16; ++tile) {
      const uint32_t metadata = values.metadata[tile][lane_];
      uint32_t fragments[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) load_values(fragments[half], values.non_zeros, 16 * half, tile);
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column) {
        float* output = output_[tile][column];
        ptx::mma_sparse_m16n8k32<Element, 0>(output, fragments[0], &weights_[column][0], metadata);
        ptx::mma_sparse_m16n8k32<Element, 1>(output, fragments[1], &weights_[column][4], metadata);
      }
    }
  }

  template <int kHalf>
  __device__ void add_dense(const Panels24<Element, kHeadDim>& values) {
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 16; ++tile) {
#pragma unroll
      for (int token = 0; token < kHalfBlock24Tokens; token += 16) {
        uint32_t fragment[4];
        load_values(fragment, values, token, tile);
#pragma unroll
        for (int column = 0; column < kColumnTiles; ++column) {
          const uint32_t* weights = &weights_[column][4 * kHalf + token / 8];
          ptx::mma_m16n8k16<Element>(output_[tile][column], fragment, weights[0], weights[1]);
        }
      }
    }
  }

  // Adds up the sums. Must be called once, after the last block.
  __device__ void finish() { softmax_.finish(); }

  __device__ const ColumnSoftmax<kColumnTiles>& softmax() const { return softmax_; }

  // Dim 16 * tile + lane / 4 + 8 * half of row column % 2 of this thread's rows in tile column / 2, not normalised.
  __device__ float output(int tile, int half, int column) const {
    return output_[tile][column / 2][2 * half + column % 2];
  }

 private:
  static constexpr int kRowTiles = kBlock24Tokens / 16;

  __device__ void clear(int tile) {
#pragma unroll
    for (int i = 0; i < 4 * kColumnTiles; ++i) scores_[tile][i / 4][i % 4] = 0.0f;
  }

  __device__ void mask(int first_key) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4 * kColumnTiles; ++i) {
        const int key = first_key + 16 * tile + i % 4 / 2 * 8 + lane_ / 4;
        if (key >= visible_[i / 4 * 2 + i % 2]) scores_[tile][i / 4][i % 4] = -INFINITY;
      }
    }
  }

  // The transpose of 16 rows of values by 16 dims.
  __device__ void load_values(uint32_t (&fragment)[4], const Panels24<Element, kHeadDim>& values, int row,
                              int tile) const {
    ptx::load_matrices_transposed(fragment,
                                  values.chunk(row + lane_ / 16 * 8 + lane_ % 8, 2 * tile + lane_ / 8 % 2));
  }

  ColumnSoftmax<kColumnTiles> softmax_;
  const int lane_;
  int visible_[2 * kColumnTiles];
  uint32_t query_[kColumnTiles][kHeadDim / 8];
  float scores_[kRowTiles][kColumnTiles][4];
  uint32_t weights_[kColumnTiles][kBlock24Tokens / 8];
  float output_[kHeadDim / 16][kColumnTiles][4] = {};
};

}  // namespace kv
