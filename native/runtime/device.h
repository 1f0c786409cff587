// A place where tensors live and operations run, with its memory accounts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct MemoryReport {
  size_t live = 0;         // bytes of tensors allocated now
  size_t peak = 0;         // the most that `live` has been
  size_t scratch = 0;      // working memory of kernels
  size_t limit = 0;        // allocations past this are refused
  uint64_t finalized = 0;  // tensors that the garbage collector had to release: leaks
};

// What orders the work of one stream on a device: a CUDA stream; nothing on the CPU.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void* cuda_stream() const { return nullptr; }
  virtual Fault* fault() const { return nullptr; }
  // Memory of the device that stays this queue's, for work in its order; null when it does not fit.
  virtual void* workspace(size_t) { return nullptr; }
  // The same, all zero whenever an operation gets it: each leaves it so.
  virtual void* zeroed_workspace(size_t) { return nullptr; }
  // Waits for the work launched so far. Reports its first failure.
  virtual Status synchronize() { return Status::success(); }
};

using Queues = std::vector<std::shared_ptr<Queue>>;

class Device {
 public:
  Device(int threads, Isa isa, size_t memory_limit);
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  virtual DeviceKind kind() const = 0;
  virtual std::string name() const = 0;
  // Makes this device the calling thread's current one.
  virtual void bind_thread() {}
  virtual std::unique_ptr<Queue> create_queue() = 0;
  // Copies between host and device memory in either direction, in the queue's order; on return the host
  // memory may be read or changed.
  virtual Status copy(void* to, const void* from, size_t bytes, Queue& queue) = 0;

  // Memory for a tensor, 64-byte aligned at least; null when it does not fit.
  void* allocate(size_t bytes);
  // `uses` are the queues whose launched work may still use the memory; it is not waited for.
  void release(void* data, size_t bytes, const Queues& uses);
  void count_finalized() { finalized_.fetch_add(1, std::memory_order_relaxed); }
  MemoryReport memory();

  Workers& workers() { return workers_; }
  Isa isa() const { return isa_; }

  // Held while an operation runs: the streams of a device take turns on its workers.
  std::mutex& turn() { return turn_; }

 protected:
  virtual void* allocate_memory(size_t bytes) = 0;
  virtual void release_memory(void* data, const Queues& uses) = 0;

 private:
  Workers workers_;
  Isa isa_;
  std::mutex turn_;
  std::mutex accounts_;
  size_t live_ = 0;
  size_t peak_ = 0;
  size_t limit_;
  std::atomic<uint64_t> finalized_{0};
};

size_t physical_memory();

// `memory_limit` 0 means all that the device has.
std::shared_ptr<Device> create_cpu_device(int threads, Isa isa, size_t memory_limit);

}  // namespace kv
