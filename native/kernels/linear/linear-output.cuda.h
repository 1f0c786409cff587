// What becomes of a sum.
#pragma once

#include "kernels/linear/linear.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/silu.cuda.h"

namespace kv {

__device__ inline float bias_of(const LinearArguments& a, int64_t out) {
  return a.bias_dtype == DType::f16    ? to_float(static_cast<const __half*>(a.bias)[out])
         : a.bias_dtype == DType::bf16 ? to_float(static_cast<const __nv_bfloat16*>(a.bias)[out])
                                       : static_cast<const float*>(a.bias)[out];
}

// What the output adds to its sum, if it accumulates.
template <class T>
__device__ float before_sum(const LinearArguments& a, int64_t token, int64_t out) {
  return a.accumulate ? to_float(static_cast<const T*>(a.output)[token * a.output_stride + out]) : 0.0f;
}

// output[token, out] = sum (+ bias[out]) (+ itself, which is `before`)
template <class T>
__device__ void write_sum(const LinearArguments& a, int64_t token, int64_t out, float sum, float before) {
  if (a.bias != nullptr) sum += bias_of(a, out);
  static_cast<T*>(a.output)[token * a.output_stride + out] = from_float<T>(a.accumulate ? before + sum : sum);
}

// silu(gate) * up, of sums with their biases, rounded as linear and swiglu round one behind the other.
template <class T>
__device__ T gated_of(float gate, float up) {
  const auto rounded = [](float sum) { return to_float(from_float<T>(sum)); };
  return from_float<T>(silu(rounded(gate)) * rounded(up));
}

}  // namespace kv
