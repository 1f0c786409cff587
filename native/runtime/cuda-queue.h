// The work of one stream on a CUDA device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <memory>

#include "runtime/device.h"
#include "runtime/pinned-memory.h"

namespace kv {

// Working memory, freed in the order of a CUDA stream.
struct CudaScratch {
  void* data = nullptr;
  size_t bytes = 0;
};

// Of all the working memory of a device's queues. Recordings may hold some for longer than the device lives.
using ScratchBytes = std::shared_ptr<std::atomic<size_t>>;

class CudaQueue : public Queue {
 public:
  // Null when the device has no room for it.
  static std::shared_ptr<CudaQueue> create(std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes);
  CudaQueue(cudaStream_t stream, Fault* fault, std::shared_ptr<PinnedMemory> pinned, ScratchBytes scratch_bytes);
  ~CudaQueue() override;

  // Where its own thread launches. A capture has a stream of its own, for other threads go on freeing memory in the
  // order of the queue's, and what they put into a stream that captures would be captured.
  void* cuda_stream() const override { return capturing_ != nullptr ? capturing_ : stream_; }
  // The queue's order, for every thread.
  cudaStream_t stream() const { return stream_; }
  Fault* fault() const override { return fault_; }
  void* workspace(size_t bytes) override;
  void* zeroed_workspace(size_t bytes) override;
  std::unique_ptr<Moment> mark() override;
  Status capture(const std::function<Status()>& launches, std::unique_ptr<Graph>& graph) override;

  // How far the device's allocations are in order with this queue.
  uint64_t joined_stamp = 0;

 private:
  // Null when it does not fit, and during a capture: memory that a graph makes is gone after each launch.
  std::shared_ptr<CudaScratch> allocate(size_t bytes);

  cudaStream_t stream_;
  Fault* fault_;  // device memory
  std::shared_ptr<PinnedMemory> pinned_;
  ScratchBytes scratch_bytes_;
  // Shared with the graphs that were captured on it: one that grows later must not take it from them.
  std::shared_ptr<CudaScratch> workspace_;
  std::shared_ptr<CudaScratch> zeroed_;
  cudaStream_t capturing_ = nullptr;
};

}  // namespace kv
