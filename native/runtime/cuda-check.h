// CUDA results as statuses.
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

// What the launch just made reports; clears it.
inline Status launch_status() { return cuda_status(cudaGetLastError()); }

}  // namespace kv
