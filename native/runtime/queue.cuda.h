// The work of one stream on a CUDA device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "runtime/device.h"
#include "runtime/fault.h"
#include "runtime/pinned-memory.cuda.h"

namespace kv {

// Working memory, freed in the order of a CUDA stream.
struct CudaScratch {
  void* data = nullptr;
  size_t bytes = 0;
};

// Of all the working memory of a device's queues. Recordings may hold some for longer than the device lives.
using ScratchBytes = std::shared_ptr<std::atomic<size_t>>;

// In device memory: what has failed, as the device knows it.
struct CudaFaults {
  Fault fault;
  int32_t host_part_failed = 0;  // as of the last mark
};

using HostTasks = std::vector<std::shared_ptr<HostTask>>;

// What is enqueued on `later` from now on runs after what is enqueued on `earlier` so far.
Status run_after(cudaStream_t later, cudaStream_t earlier);

class CudaQueue : public Queue {
 public:
  // Null when the device has no room for it.
  static std::shared_ptr<CudaQueue> create(std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes);
  CudaQueue(cudaStream_t stream, CudaFaults* faults, std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes);
  // A branch of `trunk`.
  CudaQueue(cudaStream_t stream, std::shared_ptr<CudaQueue> trunk);
  ~CudaQueue() override;

  // Where its own thread launches. A capture has a stream of its own, for other threads go on freeing memory in the
  // order of the queue's, and what they put into a stream that captures would be captured.
  void* cuda_stream() const override { return capturing_ != nullptr ? capturing_ : stream_; }
  // The queue's order, for every thread.
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

  // How far the device's allocations are in order with this queue.
  uint64_t joined_stamp = 0;

 private:
  // Null when it does not fit, and during a capture: memory that a graph makes is gone after each launch.
  std::shared_ptr<CudaScratch> allocate(size_t bytes);

  CudaQueue& trunk() { return trunk_ == nullptr ? *this : *trunk_; }

  cudaStream_t stream_;
  std::shared_ptr<CudaQueue> trunk_;  // whose branch it is, if it is one
  CudaFaults* faults_;                // of the trunk
  std::shared_ptr<PinnedMemory> pinned_;
  ScratchBytes scratch_bytes_;
  // Shared with the graphs that were captured on it: one that grows later must not take it from them.
  std::shared_ptr<CudaScratch> workspace_;
  std::shared_ptr<CudaScratch> zeroed_;
  cudaStream_t capturing_ = nullptr;
  // Of the trunk. Null until there is a host part.
  std::shared_ptr<HostFailure> host_failure_;
  HostTasks host_tasks_;  // launched and not known to be done
  HostTasks captured_;    // of the capture in progress
};

}  // namespace kv
