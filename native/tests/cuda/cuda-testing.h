// Operations of one thread, for tests of order on a CUDA device.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <future>
#include <memory>
#include <stdexcept>

#include "runtime/check.cuda.h"
#include "runtime/cuda-device.h"
#include "runtime/fault.h"
#include "runtime/stream.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv::tests {

// By default CUDA loads a kernel at its first launch, after all that the device runs then: no kernel of a test could be
// new while another waits for it, or a host part does. Before the first call of CUDA.
inline const int loads_ahead = setenv("CUDA_MODULE_LOADING", "EAGER", 0);

inline std::shared_ptr<Device> cuda_device() {
  Status status;
  std::shared_ptr<Device> device = create_cuda_device(0, 4, 0, status);
  if (device == nullptr) throw std::runtime_error(status.message);
  return device;
}

// The outcome of all that the stream was given so far.
inline Status reached(Stream& stream) {
  std::promise<Status> promise;
  stream.notify([&](const Status& status) { promise.set_value(status); });
  return promise.get_future().get();
}

// Integers that host and device see at one address.
class Shared {
 public:
  explicit Shared(int count = 1) {
    void* memory = nullptr;
    if (cudaHostAlloc(&memory, count * sizeof(int), cudaHostAllocPortable) != cudaSuccess) throw std::bad_alloc();
    values_ = static_cast<int*>(memory);
    for (int i = 0; i < count; ++i) values_[i] = 0;
  }
  ~Shared() { cudaFreeHost(values_); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  int* data() { return values_; }
  volatile int& operator[](int index) { return values_[index]; }

 private:
  int* values_;
};

// Gives up after five seconds, so that a wrong order fails and does not hang.
__device__ inline void wait_until(const volatile int* value, int wanted) {
  long long start = 0;
  long long now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*value < wanted && now - start < 5'000'000'000LL);
}

template <class Body>
__global__ void run_body(Body body) {
  ptx::follow_previous_kernel();
  body();
}

// A kernel of one thread that runs `body` in its turn, started as the kernels of a decode step are: on Hopper it may
// begin while the one ahead of it ends.
template <class Body>
Status run_on_device(ExecutionContext& context, Body body) {
  return launch_overlapped(run_body<Body>, 1, 1, 0, static_cast<cudaStream_t>(context.cuda_stream), body);
}

template <class Body>
Operation device_operation(const char* name, Body body) {
  return {name, {}, [body](ExecutionContext& context) { return run_on_device(context, body); }};
}

inline Operation host_operation(const char* name, HostPart part) {
  return {name, {}, [part](ExecutionContext& context) { return context.queue->run_on_host(part, context); }};
}

}  // namespace kv::tests
