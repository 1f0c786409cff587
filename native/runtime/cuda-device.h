// CUDA devices. In a build without CUDA, or on a machine without a driver, every function here still works and says
// why there is no device.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device.h"

namespace kv {

struct CudaDeviceFacts {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  size_t memory = 0;
};

struct CudaReport {
  bool built = false;
  std::vector<CudaDeviceFacts> devices;
  std::string reason;  // why there is no device; empty when there is one
};

CudaReport cuda_report();

// Returns null, with the reason in `status`, when the device cannot be opened.
std::shared_ptr<Device> create_cuda_device(int index, int threads, size_t memory_limit, Status& status);

}  // namespace kv
