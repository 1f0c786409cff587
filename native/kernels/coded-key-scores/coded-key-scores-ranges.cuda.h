// Between which scores lie those that a thread block computes. Device code.
#pragma once

#include "kernels/coded-key-scores/coded-key-scores.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/key-scores/entry-head.cuda.h"

namespace kv::cuda {

// Of the scores of a column. The largest is NaN where a score is.
struct ScoreRange {
  float least = INFINITY;
  float most = -INFINITY;

  __device__ void add(float2 other) {
    least = fminf(least, other.x);
    most = ptx::larger_or_nan(most, other.y);
  }
  __device__ void add(float score) { add(make_float2(score, score)); }
  // That of another lane, for a whole warp.
  __device__ void add_lane(int distance) {
    add(make_float2(__shfl_xor_sync(0xffffffffu, least, distance), __shfl_xor_sync(0xffffffffu, most, distance)));
  }
  __device__ float2 both() const { return make_float2(least, most); }
};

// Writes the ranges of the thread block's scores of columns from `first` on, which its warps have found. The first thread block
// of a head says that parts behind those of all have no scores. A whole thread block calls it.
template <int kWarps, int kColumns>
__device__ void write_ranges(const CodedKeyScoresArguments& a, const EntryHead& entry, int head, int first,
                             const float2 (&of_warps)[kWarps][kColumns]) {
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const int group_heads = a.query_heads / a.kv_heads;
  const int columns = min(kColumns, entry.columns - first);
  const auto part_of = [&](int column, int part) -> float2& {
    const int number = first + column;
    float* parts = a.ranges_of(entry.first_row + number / group_heads, head * group_heads + number % group_heads);
    return reinterpret_cast<float2*>(parts)[part];
  };
  if (thread < columns) {
    ScoreRange range;
    for (int warp = 0; warp < kWarps; ++warp) range.add(of_warps[warp][thread]);
    part_of(thread, static_cast<int>(blockIdx.x)) = range.both();
  }
  const int found = static_cast<int>(gridDim.x);
  const int rest = a.range_parts - found;
  if (blockIdx.x == 0) {
    for (int i = thread; i < columns * rest; i += kWarps * kWarp) part_of(i / rest, found + i % rest) = ScoreRange{}.both();
  }
  __syncthreads();
}

}  // namespace kv::cuda
