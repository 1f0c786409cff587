// The scheduler of persistent kernels: one thread block on each multiprocessor takes work tiles until none is left.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/check.cuda.h"

namespace kv::sm90a {

// The number of a thread block's work tile. The first is the block's own number; the counter `taken` gives the later
// ones. All lanes of one warp must call together. They ask for the next number before they use a tile, so that they
// do not wait for it.
class WorkNumber {
 public:
  __device__ explicit WorkNumber(unsigned* taken) : taken_(taken) {}

  __device__ unsigned current() const { return current_; }
  __device__ void ask() {
    next_ = 0;
    if (threadIdx.x % 32 == 0) next_ = gridDim.x + atomicAdd(taken_, 1u);
  }
  __device__ void advance() { current_ = __shfl_sync(0xffffffffu, next_, 0); }

 private:
  unsigned* taken_;
  unsigned current_ = blockIdx.x;
  unsigned next_ = 0;  // in lane 0
};

// Launches the kernel. `taken` is in device memory and is set to 0 before the kernel starts.
template <class Parameters>
Status launch_persistent(void (*kernel)(Parameters), const Parameters& parameters, int threads, int shared_bytes,
                         unsigned* taken, cudaStream_t stream) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess) error = cudaMemsetAsync(taken, 0, sizeof(unsigned), stream);
  if (error != cudaSuccess) return cuda_status(error);
  kernel<<<multiprocessors, threads, shared_bytes, stream>>>(parameters);
  return launch_status();
}

}  // namespace kv::sm90a
