#include <cuda_runtime.h>

#include <utility>

#include "runtime/cuda-check.h"
#include "runtime/cuda-device.h"
#include "runtime/fault.h"

namespace kv {
namespace {

class CudaQueue : public Queue {
 public:
  CudaQueue(cudaStream_t stream, Fault* fault) : stream_(stream), fault_(fault) {}
  ~CudaQueue() override {
    for (const Scratch& scratch : {workspace_, zeroed_}) {
      if (scratch.data != nullptr) cudaFreeAsync(scratch.data, stream_);
    }
    cudaStreamDestroy(stream_);
    cudaFreeHost(fault_);
  }

  void* cuda_stream() const override { return stream_; }
  Fault* fault() const override { return fault_; }

  void* workspace(size_t bytes) override {
    grow(workspace_, bytes);
    return workspace_.data;
  }

  void* zeroed_workspace(size_t bytes) override {
    const bool grown = grow(zeroed_, bytes);
    if (grown && zeroed_.data != nullptr) cudaMemsetAsync(zeroed_.data, 0, bytes, stream_);
    return zeroed_.data;
  }

  Status synchronize() override {
    const Status status = cuda_status(cudaStreamSynchronize(stream_));
    if (!status.ok() || fault_->code == FaultCode::none) return status;
    const Fault fault = std::exchange(*fault_, Fault{});
    return {StatusCode::invalid_value, describe(fault), fault.operation};
  }

 private:
  cudaStream_t stream_;
  struct Scratch {
    void* data = nullptr;
    size_t bytes = 0;
  };

  // Whether there was less before. Leaves no data when it does not fit.
  bool grow(Scratch& scratch, size_t bytes) {
    if (bytes <= scratch.bytes) return false;
    if (scratch.data != nullptr) cudaFreeAsync(scratch.data, stream_);
    scratch = {};
    if (cudaMallocAsync(&scratch.data, bytes, stream_) == cudaSuccess) {
      scratch.bytes = bytes;
    } else {
      scratch.data = nullptr;
    }
    return true;
  }

  Fault* fault_;  // pinned host memory
  Scratch workspace_;
  Scratch zeroed_;
};

// What is enqueued on `later` from now on runs after what is enqueued on `earlier` so far.
void wait_for(cudaStream_t later, cudaStream_t earlier) {
  cudaEvent_t reached = nullptr;
  if (cudaEventCreateWithFlags(&reached, cudaEventDisableTiming) != cudaSuccess) return;
  cudaEventRecord(reached, earlier);
  cudaStreamWaitEvent(later, reached, 0);
  cudaEventDestroy(reached);
}

class CudaDevice : public Device {
 public:
  CudaDevice(int index, const CudaDeviceFacts& facts, cudaStream_t allocations, int threads, size_t memory_limit)
      : Device(threads, best_isa(), memory_limit), index_(index), facts_(facts), allocations_(allocations) {}

  ~CudaDevice() override {
    bind_thread();
    cudaStreamDestroy(allocations_);
  }

  DeviceKind kind() const override { return DeviceKind::cuda; }
  std::string name() const override { return "cuda:" + std::to_string(index_) + " (" + facts_.name + ")"; }
  void bind_thread() override { cudaSetDevice(index_); }

  std::unique_ptr<Queue> create_queue() override {
    bind_thread();
    cudaStream_t stream = nullptr;
    Fault* fault = nullptr;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return nullptr;
    if (cudaHostAlloc(&fault, sizeof(Fault), cudaHostAllocPortable) != cudaSuccess) {
      cudaStreamDestroy(stream);
      return nullptr;
    }
    *fault = Fault{};
    return std::make_unique<CudaQueue>(stream, fault);
  }

  Status copy(void* to, const void* from, size_t bytes, Queue& queue) override {
    const auto stream = static_cast<cudaStream_t>(queue.cuda_stream());
    const Status status = cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    return status.ok() ? queue.synchronize() : status;
  }

 protected:
  void* allocate_memory(size_t bytes) override {
    bind_thread();
    void* data = nullptr;
    if (cudaMallocAsync(&data, bytes == 0 ? 1 : bytes, allocations_) != cudaSuccess ||
        cudaStreamSynchronize(allocations_) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return data;
  }

  // In the order of the streams that used the memory, so that the caller does not wait.
  void release_memory(void* data, const Queues& uses) override {
    bind_thread();
    cudaStream_t last = allocations_;
    for (const std::shared_ptr<Queue>& queue : uses) {
      const auto stream = static_cast<cudaStream_t>(queue->cuda_stream());
      if (last != allocations_) wait_for(stream, last);
      last = stream;
    }
    cudaFreeAsync(data, last);
  }

 private:
  int index_;
  CudaDeviceFacts facts_;
  cudaStream_t allocations_;
};

}  // namespace

CudaReport cuda_report() {
  CudaReport report;
  report.built = true;
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  if (result != cudaSuccess || count == 0) {
    cudaGetLastError();
    report.reason = result == cudaSuccess ? "no CUDA device is visible" : cudaGetErrorString(result);
    return report;
  }
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    report.devices.push_back({properties.name, properties.major, properties.minor, properties.multiProcessorCount,
                              properties.totalGlobalMem});
  }
  return report;
}

std::shared_ptr<Device> create_cuda_device(int index, int threads, size_t memory_limit, Status& status) {
  const CudaReport report = cuda_report();
  if (index < 0 || static_cast<size_t>(index) >= report.devices.size()) {
    status = Status::failure(StatusCode::capability,
                             report.reason.empty()
                                 ? "this machine has " + std::to_string(report.devices.size()) + " CUDA devices"
                                 : report.reason);
    return nullptr;
  }
  const CudaDeviceFacts& facts = report.devices[static_cast<size_t>(index)];
  cudaStream_t allocations = nullptr;
  cudaMemPool_t pool = nullptr;
  status = cuda_status(cudaSetDevice(index));
  if (status.ok()) status = cuda_status(cudaStreamCreateWithFlags(&allocations, cudaStreamNonBlocking));
  if (status.ok()) status = cuda_status(cudaDeviceGetDefaultMemPool(&pool, index));
  if (!status.ok()) return nullptr;
  // Freed memory stays in the pool: the next tensor of the size costs nothing. It is handed out again once its last
  // use is over, not before: an allocation must not wait for a stream's work.
  uint64_t keep = UINT64_MAX;
  int depends = 0;
  status = cuda_status(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  if (status.ok()) status = cuda_status(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &depends));
  if (!status.ok()) return nullptr;
  return std::make_shared<CudaDevice>(index, facts, allocations, threads,
                                      memory_limit == 0 ? facts.memory : memory_limit);
}

}  // namespace kv
