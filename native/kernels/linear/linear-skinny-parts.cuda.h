// f32 rows as sums of rows of the weights' 16-bit type, which tensor cores multiply. Device code.
//
// Two parts of f16 hold 22 bits of a number, three of bf16 all 24. The range of f16 is smaller than that of f32, so a
// row of f16 parts is divided by a power of two that brings its largest magnitude to 2^14 .. 2^15. What the parts then
// lose of a number is at most 2^-23 of it, or 2^-39 of the row's largest.
#pragma once

#include "shared/cuda/elements.cuda.h"
#include "ptx/dependent-launch.cuda.h"

namespace kv {

constexpr int kSplitThreads = 256;

// Of the 16-bit type `Element`.
template <class Element>
constexpr int kParts = std::is_same_v<Element, __half> ? 2 : 3;
constexpr int kMostParts = 3;

template <class Element>
struct RowParts {
  Element* parts;  // [part, row, feature], leading parts first
  float* scales;   // [row]: a row is the sum of its parts times its scale
  int rows;        // of each part; those that the input does not have become zeros
};

// The largest magnitude of a row, in every thread. NaN does not count.
__device__ inline float largest_magnitude(const float* row, int64_t features) {
  __shared__ float largest[kSplitThreads / kWarp];
  float most = 0;
  for (int64_t i = threadIdx.x; i < features; i += kSplitThreads) most = fmaxf(most, fabsf(row[i]));
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
  }
  if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = most;
  __syncthreads();
  for (const float each : largest) most = fmaxf(most, each);
  return most;
}

// A block splits a row.
template <class Element>
__global__ void __launch_bounds__(kSplitThreads)
    split_rows(const float* input, int64_t stride, int64_t input_rows, int64_t features, RowParts<Element> to) {
  ptx::follow_previous_kernel();
  const int64_t row = blockIdx.x;
  const float* from = input + row * stride;
  float scale = 1;
  if (std::is_same_v<Element, __half> && row < input_rows) {
    const float most = largest_magnitude(from, features);
    if (most > 0 && isfinite(most)) scale = ldexpf(1.0f, max(ilogbf(most) - 14, -126));
  }
  if (threadIdx.x == 0) to.scales[row] = scale;
  for (int64_t i = threadIdx.x; i < features; i += kSplitThreads) {
    float rest = row < input_rows ? from[i] / scale : 0.0f;
#pragma unroll
    for (int part = 0; part < kParts<Element>; ++part) {
      const auto element = from_float<Element>(rest);
      to.parts[(int64_t{part} * to.rows + row) * features + i] = element;
      // What is infinite or NaN shows in the leading part.
      rest = isfinite(rest) ? rest - to_float(element) : 0.0f;
    }
  }
}

}  // namespace kv
