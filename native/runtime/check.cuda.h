// Turns CUDA results into statuses.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "runtime/status.h"

namespace kv {

inline Status cuda_status(cudaError_t result) {
  if (result == cudaSuccess) return Status::success();
  const StatusCode code =
      result == cudaErrorMemoryAllocation ? StatusCode::out_of_memory : StatusCode::device_fault;
  return Status::failure(code, std::string("CUDA: ") + cudaGetErrorString(result));
}

// The error of the launch just made. CUDA forgets the error when it is read.
inline Status launch_status() { return cuda_status(cudaGetLastError()); }

// Sets `major` to the major compute capability of the calling thread's device: 8 is Ampere and Ada, 9 is Hopper.
inline Status find_compute_capability(int& major) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return cuda_status(error);
}

}  // namespace kv
