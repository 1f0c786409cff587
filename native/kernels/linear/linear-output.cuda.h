// What becomes of a sum.
#pragma once

#include "kernels/linear/linear.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

__device__ inline float bias_of(const LinearArguments& a, int64_t out) {
  return a.bias_dtype == DType::f16    ? to_float(static_cast<const __half*>(a.bias)[out])
         : a.bias_dtype == DType::bf16 ? to_float(static_cast<const __nv_bfloat16*>(a.bias)[out])
                                       : static_cast<const float*>(a.bias)[out];
}

// output[token, out] = sum (+ bias[out]) (+ itself)
template <class T>
__device__ void write_sum(const LinearArguments& a, int64_t token, int64_t out, float sum) {
  if (a.bias != nullptr) sum += bias_of(a, out);
  T* output = static_cast<T*>(a.output) + token * a.output_stride + out;
  *output = from_float<T>(a.accumulate ? to_float(*output) + sum : sum);
}

}  // namespace kv
