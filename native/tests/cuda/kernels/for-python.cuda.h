// The functions that the scripts of tools/gpu time, of libcuda-kernels.so.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>

#include "runtime/fault.h"
#include "tests/cuda/kernels/device.cuda.h"

#define KV_FOR_PYTHON extern "C" __attribute__((visibility("default")))

namespace kv::tests {

// Returns 0, or prints why not.
inline int result_for_python(const Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  return 1;
}

// Where all these functions report bad data; kv_take_fault reads it.
inline Fault* fault_for_python() {
  static Fault* const fault = [] {
    Fault* pinned = nullptr;
    succeeds(cudaHostAlloc(&pinned, sizeof(Fault), cudaHostAllocPortable));
    *pinned = Fault{};
    return pinned;
  }();
  return fault;
}

}  // namespace kv::tests
