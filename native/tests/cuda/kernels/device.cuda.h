// What the checks of kernels need of CUDA: memory, calls that throw when they fail, types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "runtime/check.cuda.h"
#include "runtime/dtype.h"

namespace kv::tests {

inline void succeeds(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message);
}

inline void succeeds(cudaError_t result) { succeeds(cuda_status(result)); }

template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count, int byte = 0) : count_(count) {
    succeeds(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)));
    succeeds(cudaMemset(data_, byte, std::max<size_t>(count, 1) * sizeof(T)));
    finish();
  }
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size()) { upload(host); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* get() const { return data_; }

  void upload(const std::vector<T>& host) {
    succeeds(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    finish();
  }

  std::vector<T> host() const {
    std::vector<T> result(count_);
    succeeds(cudaMemcpy(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return result;
  }

 private:
  // Small copies from ordinary memory return before the device has made them, and other streams do not wait for them.
  static void finish() { succeeds(cudaStreamSynchronize(cudaStreamLegacy)); }

  T* data_ = nullptr;
  size_t count_;
};

// Calls `body` with a value of the C++ type that stores a 16-bit dtype.
template <class Body>
auto with_16_bit_type(DType dtype, Body&& body) {
  return dtype == DType::f16 ? body(__half()) : body(__nv_bfloat16());
}

}  // namespace kv::tests
