#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "runtime/check.cuda.h"
#include "runtime/cuda-device.h"
#include "runtime/pinned-memory.cuda.h"
#include "runtime/pinned-range.h"
#include "runtime/queue.cuda.h"
#include "runtime/releases.h"

namespace kv {
namespace {

class CudaDevice : public Device {
 public:
  CudaDevice(int index, const CudaDeviceFacts& facts, cudaStream_t allocations, int threads, size_t memory_limit)
      : Device(threads, best_isa(), memory_limit), index_(index), facts_(facts), allocations_(allocations) {}

  ~CudaDevice() override {
    bind_thread();
    releases_.reset();
    pinned_->drain();
    cudaStreamDestroy(allocations_);
  }

  DeviceKind kind() const override { return DeviceKind::cuda; }
  std::string name() const override { return "cuda:" + std::to_string(index_) + " (" + facts_.name + ")"; }
  void bind_thread() override { cudaSetDevice(index_); }

  std::shared_ptr<Queue> create_queue() override {
    bind_thread();
    return CudaQueue::create(pinned_, queues_scratch_bytes_, bells_);
  }

  std::shared_ptr<HostMemory> host_memory(size_t bytes) override {
    std::shared_ptr<HostMemory> pinned = pinned_->take(bytes);
    return pinned != nullptr ? pinned : HostMemory::allocate(bytes);
  }

  // Memory that is not pinned is read by the driver during the call. A host part ahead in the stream may not have
  // written it by then, so the stream is waited for first.
  Status upload(void* to, const std::shared_ptr<HostMemory>& from, Queue& queue) override {
    const auto stream = static_cast<cudaStream_t>(queue.cuda_stream());
    Status status;
    if (!from->pinned && !from->reachable) status = cuda_status(cudaStreamSynchronize(stream));
    return status.ok() ? host_copy(to, from->data, from, stream) : status;
  }

  Status download(const std::shared_ptr<HostMemory>& to, const void* from, Queue& queue) override {
    return host_copy(to->data, from, to, static_cast<cudaStream_t>(queue.cuda_stream()));
  }

  Status copy(void* to, const void* from, size_t bytes, Queue& queue) override {
    const auto stream = static_cast<cudaStream_t>(queue.cuda_stream());
    return cuda_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

  // Contents for which there is no pinned memory are waited for: the driver copies them as fast as the caller could
  // copy them to other memory.
  Status fill(void* data, const void* contents, size_t bytes) override {
    bind_thread();
    std::shared_ptr<HostMemory> memory = pinned_->take(bytes);
    if (memory == nullptr) return host_copy(data, contents, HostMemory::borrow(contents, bytes), allocations_);
    std::memcpy(memory->data, contents, bytes);
    return host_copy(data, memory->data, memory, allocations_);
  }

  std::shared_ptr<HostRange> host_range(size_t bytes, Status& status) override {
    return PinnedRange::create(bytes, host_ranges_bytes_, status);
  }

  void when_done(const Queues& uses, std::function<void()> release) override {
    bind_thread();
    std::vector<std::shared_ptr<Moment>> moments;
    for (const std::shared_ptr<Queue>& queue : uses) moments.push_back(queue->mark_launched());
    releases_->add(std::move(moments), std::move(release));
  }

  Status join(Queue& queue, uint64_t stamp) override {
    auto& joining = static_cast<CudaQueue&>(queue);
    if (joining.joined_stamp >= stamp) return Status::success();
    joining.joined_stamp = latest_stamp();
    return run_after(joining.stream(), allocations_);
  }

 protected:
  size_t scratch_bytes() const override { return Device::scratch_bytes() + queues_scratch_bytes_->load(); }
  size_t pinned_bytes() const override { return pinned_->bytes() + host_ranges_bytes_->load(); }

  void* allocate_memory(size_t bytes) override {
    bind_thread();
    void* data = nullptr;
    if (cudaMallocAsync(&data, bytes == 0 ? 1 : bytes, allocations_) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return data;
  }

  // The memory is freed in the order of the streams that used it, so that the caller does not wait. The caller waits
  // only if no event can be made that orders two of the streams.
  void release_memory(void* data, const Queues& uses) override {
    bind_thread();
    cudaStream_t last = allocations_;
    for (const std::shared_ptr<Queue>& queue : uses) {
      const cudaStream_t stream = static_cast<CudaQueue&>(*queue).stream();
      if (last != allocations_ && !run_after(stream, last).ok()) {
        cudaGetLastError();
        cudaStreamSynchronize(last);
      }
      last = stream;
    }
    cudaFreeAsync(data, last);
  }

 private:
  // `memory` is the side of the copy that lies on the host.
  Status host_copy(void* to, const void* from, const std::shared_ptr<HostMemory>& memory, cudaStream_t stream) {
    if (memory->reachable) return copy_slabs(to, from, *memory, stream);
    const Status status = cuda_status(cudaMemcpyAsync(to, from, memory->bytes, cudaMemcpyDefault, stream));
    if (!status.ok()) return status;
    if (!memory->pinned) return cuda_status(cudaStreamSynchronize(stream));
    pinned_->hold(memory, stream);
    return status;
  }

  // Copies memory of a HostPool. The pool was pinned slab by slab, and one copy must not cross the end of a slab.
  Status copy_slabs(void* to, const void* from, const HostMemory& memory, cudaStream_t stream) {
    const size_t first = HostRange::kSlabBytes - reinterpret_cast<size_t>(memory.data) % HostRange::kSlabBytes;
    Status status;
    for (size_t begin = 0, end = std::min(first, memory.bytes); begin < memory.bytes && status.ok();
         begin = end, end = std::min(end + HostRange::kSlabBytes, memory.bytes)) {
      status = cuda_status(cudaMemcpyAsync(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                                           end - begin, cudaMemcpyDefault, stream));
    }
    return status;
  }

  int index_;
  CudaDeviceFacts facts_;
  cudaStream_t allocations_;
  std::shared_ptr<PinnedMemory> pinned_ = std::make_shared<PinnedMemory>();
  std::shared_ptr<std::atomic<size_t>> host_ranges_bytes_ = std::make_shared<std::atomic<size_t>>(0);
  std::unique_ptr<Releases> releases_ = std::make_unique<Releases>([this] { bind_thread(); });
  std::shared_ptr<CudaHostBells> bells_ = std::make_shared<CudaHostBells>();
  ScratchBytes queues_scratch_bytes_ = std::make_shared<std::atomic<size_t>>(0);
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
  // Freed memory stays in the pool, so that the next tensor of the same size costs nothing. The pool reuses memory
  // only after its last use is over: otherwise an allocation would wait for a stream's work.
  uint64_t keep = UINT64_MAX;
  int depends = 0;
  status = cuda_status(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
  if (status.ok()) status = cuda_status(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &depends));
  if (!status.ok()) return nullptr;
  return std::make_shared<CudaDevice>(index, facts, allocations, threads,
                                      memory_limit == 0 ? facts.memory : memory_limit);
}

}  // namespace kv
