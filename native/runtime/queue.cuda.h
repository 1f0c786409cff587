// The work of one stream on a CUDA device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/device.h"
#include "runtime/fault.h"
#include "runtime/host-bells.h"
#include "runtime/pinned-memory.cuda.h"

namespace kv {

// Working memory, which is freed in the order of a CUDA stream.
struct CudaScratch {
  void* data = nullptr;
  size_t bytes = 0;
};

// Bytes of working memory of all queues of a device. Shared, because a recording may outlive the device.
using ScratchBytes = std::shared_ptr<std::atomic<size_t>>;

// The failures that the device knows of, in device memory.
struct CudaFaults {
  Fault fault;
  int32_t host_part_failed = 0;  // as copied at the last mark
};

using HostTasks = std::vector<std::shared_ptr<HostTask>>;

// Those of a device, made when the first host part is launched. Shared, because a recording may outlive the device.
class CudaHostBells {
 public:
  // Null when the host has no memory to pin, or no thread.
  std::shared_ptr<HostBells> get();

 private:
  std::mutex mutex_;
  std::shared_ptr<HostBells> bells_;
};

// What is enqueued on `later` from now on runs after what is enqueued on `earlier` so far.
Status run_after(cudaStream_t later, cudaStream_t earlier);

class CudaQueue : public Queue {
 public:
  // Null when the device has no room for a queue.
  static std::shared_ptr<CudaQueue> create(std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes,
                                           std::shared_ptr<CudaHostBells> bells);
  CudaQueue(cudaStream_t stream, CudaFaults* faults, std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes,
            std::shared_ptr<CudaHostBells> bells);
  // Makes a branch of `trunk`.
  CudaQueue(cudaStream_t stream, std::shared_ptr<CudaQueue> trunk);
  ~CudaQueue() override;

  // The stream into which the queue's own thread launches. A capture uses another stream: other threads free memory
  // in the order of `stream_` meanwhile, and their calls would be captured.
  void* cuda_stream() const override { return capturing_ != nullptr ? capturing_ : stream_; }
  void* side_stream() override;
  // The stream that gives the queue its order, for every thread.
  cudaStream_t stream() const { return stream_; }
  Fault* fault() const override { return &faults_->fault; }
  void* workspace(size_t bytes) override;
  void* zeroed_workspace(size_t bytes) override;
  Status run_on_host(HostPart part, ExecutionContext& context) override;
  void close() override;
  std::shared_ptr<Moment> mark() override;
  std::shared_ptr<Moment> mark_launched() override;
  Status run_after(const Moment& moment) override;
  Status run_after(Queue& other) override;
  std::shared_ptr<Queue> branch() override;
  Status capture(const std::function<Status()>& launches, const Queues& branches,
                 std::unique_ptr<Graph>& graph) override;

  // The newest allocation of the device that this queue is ordered after.
  uint64_t joined_stamp = 0;

 private:
  // Null when the memory does not fit, and during a capture: memory that a graph allocates is lost after each launch.
  std::shared_ptr<CudaScratch> allocate(size_t bytes);

  CudaQueue& trunk() { return trunk_ == nullptr ? *this : *trunk_; }

  cudaStream_t stream_;
  std::shared_ptr<CudaQueue> trunk_;  // the queue that this one is a branch of, or null
  CudaFaults* faults_;                // owned by the trunk
  std::shared_ptr<PinnedMemory> pinned_;
  ScratchBytes scratch_bytes_;
  std::shared_ptr<CudaHostBells> bells_;
  std::shared_ptr<HostBell> bell_;  // null until the first host part of this queue
  // Shared with the graphs that were captured with this memory, so that it stays when the queue's own memory is
  // replaced by more.
  std::shared_ptr<CudaScratch> workspace_;
  std::shared_ptr<CudaScratch> zeroed_;
  cudaStream_t capturing_ = nullptr;
  cudaStream_t side_ = nullptr;  // made when it is first asked for
  // Used by the trunk only. Null until the first host part.
  std::shared_ptr<HostFailure> host_failure_;
  HostTasks host_tasks_;  // launched, not known to be done
  HostTasks captured_;    // of the capture in progress
};

}  // namespace kv
