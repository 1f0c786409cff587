// Products of keys with probed rows.
#pragma once

#include "ptx/mma.cuda.h"
#include "shared/prefill-block-scores/prefill-block-scores.cuda.h"

namespace kv {
namespace prefill_block_scores {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Products of 128 rows with 64 columns, on tensor cores in tf32: elements of 16 bits are exact, those of f32 are
// rounded to 11 bits. Warp w has the rows from 32 * (w / 2) on and the columns from 32 * (w % 2) on.
struct Products {
  static constexpr int kRows = 128;
  static constexpr int kColumns = 64;
  static constexpr int kDepth = kWarp;

  // Padded, so that the lanes of a fragment are in banks of their own.
  struct Shared {
    float rows[kRows][kDepth + 4];
    float columns[kColumns][kDepth + 4];
  };

  float sums[2][4][4] = {};

  // `rows_at(k)` and `columns_at(k)` return a function of the row or column, which reads its element k.
  template <class RowsAt, class ColumnsAt>
  __device__ void add(Shared& shared, int depth, RowsAt&& rows_at, ColumnsAt&& columns_at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    for (int first = 0; first < depth; first += kDepth) {
      __syncthreads();
      const int k = first + lane;
      const bool real = k < depth;
      const auto row_at = rows_at(real ? k : 0);
      const auto column_at = columns_at(real ? k : 0);
#pragma unroll 4
      for (int row = warp; row < kRows; row += kWarps) shared.rows[row][lane] = real ? rounded(row_at(row)) : 0;
#pragma unroll 4
      for (int column = warp; column < kColumns; column += kWarps) {
        shared.columns[column][lane] = real ? rounded(column_at(column)) : 0;
      }
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kDepth; step += 8) multiply(shared, step + lane % 4);
    }
  }

  // Calls body(row, column, sum) for the elements of this thread.
  template <class Body>
  __device__ void for_each(Body&& body) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) body(row_of(m, i / 2), column_of(n, i % 2), sums[m][n][i]);
      }
    }
  }

  __device__ static int row_of(int m, int half) {
    return static_cast<int>(threadIdx.x) / kWarp / 2 * 32 + m * 16 + half * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
  }
  __device__ static int column_of(int n, int odd) {
    return static_cast<int>(threadIdx.x) / kWarp % 2 * 32 + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + odd;
  }

 private:
  __device__ static float rounded(float x) { return __uint_as_float(ptx::rounded_to_tf32(__float_as_uint(x))); }

  __device__ void multiply(const Shared& shared, int k) {
    const int place = static_cast<int>(threadIdx.x) % kWarp / 4;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    uint32_t left[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row = warp / 2 * 32 + m * 16 + place;
#pragma unroll
      for (int i = 0; i < 4; ++i) left[m][i] = __float_as_uint(shared.rows[row + i % 2 * 8][k + i / 2 * 4]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* column = shared.columns[warp % 2 * 32 + n * 8 + place];
      const uint32_t right[2] = {__float_as_uint(column[k]), __float_as_uint(column[k + 4])};
#pragma unroll
      for (int m = 0; m < 2; ++m) ptx::mma_m16n8k8(sums[m][n], left[m], right[0], right[1]);
    }
  }
};

}  // namespace prefill_block_scores
}  // namespace kv
