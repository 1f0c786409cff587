// Mean keys as columns of products, and the queries beside them.
#pragma once

#include "shared/prefill-block-scores/prefill-block-scores.h"
#include "shared/prefill-block-scores/tile-products.cuda.h"

namespace kv {
namespace prefill_block_scores {

// What means, and queries beside them, are rounded to: f16 keeps as many bits as tf32, and bf16 fewer.
template <class Q>
using Rounded = std::conditional_t<std::is_same_v<Q, float>, float, __half>;

// Means times the scale, base 2. They fill runs and slices; what is beyond is zeros.
struct MeanKeys {
  void* memory;  // [kv_head, column, depth]
  int columns;
  int depth;

  template <class E>
  static MeanKeys of(const PrefillBlockScoresArguments& a, int count) {
    constexpr int kRun = TileProducts<E, 2>::kColumns;
    return {nullptr, (count + kRun - 1) / kRun * kRun, (a.head_dim + kSliceElements<E> - 1) / kSliceElements<E> * kSliceElements<E>};
  }

  template <class E>
  size_t bytes(const PrefillBlockScoresArguments& a) const {
    return static_cast<size_t>(int64_t{a.kv_heads} * columns * depth) * sizeof(E);
  }

  template <class E>
  __device__ E* column(int64_t kv_head, int64_t index) const {
    return static_cast<E*>(memory) + (kv_head * columns + index) * depth;
  }

  // Enqueues copies of a slice of a run's columns.
  template <class Products>
  __device__ void load(char* to, int64_t kv_head, int run, int slice) const {
    using E = typename Products::E;
    constexpr int kTogether = Products::kThreads / kPieces;
    const int piece = static_cast<int>(threadIdx.x) % kPieces;
    const int own = static_cast<int>(threadIdx.x) / kPieces;
    const E* from = column<E>(kv_head, int64_t{run} * Products::kColumns + own) + slice * kSliceElements<E> + piece * kPieceElements<E>;
#pragma unroll
    for (int i = 0; i < Products::kColumns / kTogether; ++i) {
      ptx::async_copy_16(piece_at(to, own + i * kTogether, piece), from + int64_t{i} * kTogether * depth, true);
    }
  }
};

// Writes a slice of all rows; query_of(row) is a pointer, or null for a row of zeros.
template <class Q, class Products, class QueryOf>
__device__ void load_queries(char* to, int slice, int dim, QueryOf&& query_of) {
  using E = typename Products::E;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const int first = slice * kSliceElements<E> + piece * kPieceElements<E>;
  for (int row = static_cast<int>(threadIdx.x) / kPieces; row < Products::kRows; row += Products::kThreads / kPieces) {
    const Q* const query = query_of(row);
    store_piece<E>(piece_at(to, row, piece), [&](int e) {
      return query != nullptr && first + e < dim ? to_float(query[first + e]) : 0.0f;
    });
  }
}

}  // namespace prefill_block_scores
}  // namespace kv
