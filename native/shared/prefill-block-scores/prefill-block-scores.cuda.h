// What the kernels that estimate block scores on a CUDA device share.
#pragma once

#define KV_ISA cuda
#include "ptx/arithmetic.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/prefill-block-scores/scored-tile.h"

namespace kv {
namespace prefill_block_scores {

using cuda::key_at;
using cuda::key_offset;
using cuda::query_at;
using cuda::query_offset;
using cuda::ScoredTile;

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.69314718f;

// A sum of powers of two: sum * 2^peak.
struct LogSum {
  float peak;
  float sum;

  __device__ static LogSum nothing() { return {-INFINITY, 0}; }
  __device__ float base_2() const { return peak + log2f(sum); }
  __device__ float natural() const { return kLn2 * base_2(); }
};

__device__ inline LogSum merged(LogSum a, LogSum b) {
  const float higher = fmaxf(a.peak, b.peak);
  // Of nothing but zeros any number may be subtracted. What is NaN stays in the sum.
  const float offset = higher == -INFINITY ? 0.0f : higher;
  return {higher, a.sum * ptx::exp2_approximate(a.peak - offset) + b.sum * ptx::exp2_approximate(b.peak - offset)};
}

// The sum over logarithms, base 2, of this lane and of those whose numbers differ from its own in no bits but kBits.
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
  for (int i = 0; i < kCount; ++i) sum += ptx::exp2_approximate(logarithms[i] - offset);
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
template <int kThreads>
__device__ LogSum merged_across_block(LogSum own) {
  constexpr int kWarps = kThreads / kWarp;
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
template <int kThreads>
__device__ void normalise(const PrefillBlockScoresArguments& a, const ScoredTile& tile) {
  __syncthreads();
  const int seen = tile.seen();
  LogSum all = LogSum::nothing();
  for (int block = static_cast<int>(threadIdx.x); block < seen; block += kThreads) {
    const float score[] = {tile.scores[block] * kLog2E};
    all = merged(all, sum_of<0>(score));
  }
  const float total = merged_across_block<kThreads>(all).natural();
  for (int block = static_cast<int>(threadIdx.x); block < a.blocks; block += kThreads) {
    tile.scores[block] = block < seen ? tile.scores[block] - total : -INFINITY;
  }
}

}  // namespace prefill_block_scores

// Working memory of an estimate: arguments whose tables are checked, whether the counts are those of the scores (else
// nothing may be read or written), and `bytes` more.
struct BlockScoresMemory {
  const int32_t* fits = nullptr;
  char* rest = nullptr;
};

// Replaces the tables of `a`, and enqueues the checks that only the device can make.
Status prepare_block_scores_cuda(PrefillBlockScoresArguments& a, size_t bytes, ExecutionContext& context,
                                 BlockScoresMemory& memory);

}  // namespace kv
