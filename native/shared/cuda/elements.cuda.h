// Shared by the CUDA kernels: storage types as C++ types, f32 arithmetic on them, and reductions over a thread block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "runtime/check.cuda.h"
#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/fault.h"

namespace kv {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls body with a value of the C++ type that stores `dtype`, which must be one of the three float types.
template <class Body>
void with_cuda_float_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f16:
      return body(__half{});
    case DType::bf16:
      return body(__nv_bfloat16{});
    default:
      return body(0.0f);
  }
}

inline cudaStream_t stream_of(const ExecutionContext& context) { return static_cast<cudaStream_t>(context.cuda_stream); }

constexpr int kWarp = 32;

__device__ inline float warp_sum(float x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The sum over a thread block of at most 1024 threads. Every thread gets it.
__device__ inline float block_sum(float x) {
  __shared__ float partial[kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) partial[warp] = x;
  __syncthreads();
  return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

}  // namespace kv
