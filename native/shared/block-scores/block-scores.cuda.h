// What the kernels that estimate block scores on a CUDA device share.
#pragma once

#define KV_ISA cuda
#include "ptx/mma.cuda.h"
#include "shared/block-scores/scored-tile.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace block_scores {

using cuda::key_at;
using cuda::query_at;
using cuda::ScoredTile;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// A sum of exponentials: sum * e^peak.
struct LogSum {
  float peak;
  float sum;

  __device__ static LogSum nothing() { return {-INFINITY, 0}; }
  __device__ float logarithm() const { return peak + logf(sum); }
};

__device__ inline LogSum merged(LogSum a, LogSum b) {
  const float higher = fmaxf(a.peak, b.peak);
  // Of nothing but zeros any number may be subtracted. What is NaN stays in the sum.
  const float offset = higher == -INFINITY ? 0.0f : higher;
  return {higher, a.sum * expf(a.peak - offset) + b.sum * expf(b.peak - offset)};
}
// The sum over logarithms of this lane and of those whose numbers differ from its own in no bits but kBits.
template <int kBits, int kCount>
__device__ inline LogSum sum_of(const float (&logarithms)[kCount]) {
  float peak = logarithms[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) peak = fmaxf(peak, logarithms[i]);
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    if ((kBits & bit) != 0) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, bit));
  }
  // fmaxf leaves NaN out unless all are; of nothing but zeros any number may be subtracted.
  const float offset = peak > -INFINITY ? peak : 0.0f;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += expf(logarithms[i] - offset);
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    if ((kBits & bit) != 0) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
  }
  return {peak > -INFINITY ? peak : -INFINITY, sum};
}

// The same of sums.
template <int kBits>
__device__ inline LogSum merged_across(LogSum own) {
#pragma unroll
  for (int bit = 1; bit < kWarp; bit *= 2) {
    if ((kBits & bit) == 0) continue;
    own = merged(own, {__shfl_xor_sync(0xffffffffu, own.peak, bit), __shfl_xor_sync(0xffffffffu, own.sum, bit)});
  }
  return own;
}

// Of a thread block of kThreads threads. Every thread gets it.
__device__ inline LogSum merged_across_block(LogSum own) {
  __shared__ LogSum partial[kWarps];
  own = merged_across<kWarp - 1>(own);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = own;
  __syncthreads();
  own = partial[0];
  for (int warp = 1; warp < kWarps; ++warp) own = merged(own, partial[warp]);
  return own;
}

// As of the CPU's kernels. All threads of the block must have written their scores; they are read after a barrier.
__device__ inline void normalise(const BlockScoresArguments& a, const ScoredTile& tile) {
  __syncthreads();
  const int seen = tile.seen();
  LogSum all = LogSum::nothing();
  for (int block = static_cast<int>(threadIdx.x); block < seen; block += kThreads) {
    const float score[] = {tile.scores[block]};
    all = merged(all, sum_of<0>(score));
  }
  const float total = merged_across_block(all).logarithm();
  for (int block = static_cast<int>(threadIdx.x); block < a.blocks; block += kThreads) {
    tile.scores[block] = block < seen ? tile.scores[block] - total : -INFINITY;
  }
}

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
  __device__ static float rounded(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
  }

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

}  // namespace block_scores

// Working memory of an estimate: arguments whose tables are checked, whether the counts are those of the scores (else
// nothing may be read or written), and `bytes` more.
struct BlockScoresMemory {
  const int32_t* fits = nullptr;
  char* rest = nullptr;
};

// Replaces the tables of `a`, and enqueues the checks that only the device can make.
Status prepare_block_scores_cuda(BlockScoresArguments& a, size_t bytes, ExecutionContext& context, BlockScoresMemory& memory);

}  // namespace kv
