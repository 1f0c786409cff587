// A device: the place where tensors live and operations run. It also counts its memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "runtime/execution.h"
#include "runtime/host-memory.h"
#include "runtime/host-part.h"
#include "runtime/status.h"

namespace kv {

struct MemoryReport {
  size_t live = 0;         // bytes of tensors allocated now
  size_t peak = 0;         // the most that `live` has been
  size_t scratch = 0;      // working memory of kernels
  size_t pinned = 0;       // host memory for copies, and host pools
  size_t limit = 0;        // allocations past this are refused
  uint64_t finalized = 0;  // tensors that the garbage collector had to release: leaks
};

// The moment at which everything launched on a queue so far is done.
class Moment {
 public:
  virtual ~Moment() = default;
  // The first failure before the moment, or success. Empty while the moment has not come.
  virtual std::optional<Status> poll() = 0;
  virtual Status wait() = 0;
};

// A graph of work, which a queue launches in one call.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual Status launch() = 0;
};

class Queue;
using Queues = std::vector<std::shared_ptr<Queue>>;

// The order of one stream's work on a device. On CUDA this is a CUDA stream; on the CPU there is nothing to order.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  virtual ~Queue() = default;
  virtual void* cuda_stream() const { return nullptr; }
  // A second stream for a part of an operation that need not wait for the rest of it. The operation orders the two.
  // Where thread blocks of both could start, those of this stream do. Null where there is none.
  virtual void* side_stream() { return nullptr; }
  virtual Fault* fault() const { return nullptr; }
  // Working memory on the device for operations of this queue. The memory stays the queue's. Null when it does not
  // fit.
  virtual void* workspace(size_t) { return nullptr; }
  // Like `workspace`, but all zero whenever an operation gets it: each operation leaves it zeroed.
  virtual void* zeroed_workspace(size_t) { return nullptr; }
  // Runs a host part of an operation in the queue's order. On the CPU it runs here and now. On CUDA it never takes
  // the device's turn, so that a slow host part keeps no other stream from launching.
  virtual Status run_on_host(HostPart part, ExecutionContext& context) {
    HostContext host{context.workers, context.isa};
    return part(host);
  }
  // Ends the queue: nothing more is launched. Host parts that have not begun never run; those that have begun are
  // waited for.
  virtual void close() {}
  // Marks the moment at which all that is launched so far is done. Null where work is done when its launch returns.
  virtual std::shared_ptr<Moment> mark() { return nullptr; }
  // Like `mark`, but without faults. Any thread may wait for it.
  virtual std::shared_ptr<Moment> mark_launched() { return nullptr; }
  // What is launched here from now on runs after a moment of another queue of the device.
  virtual Status run_after(const Moment&) { return Status::success(); }
  // What is launched here from now on runs after all that is launched on `other` so far. Captured, this is a
  // dependency of the graph.
  virtual Status run_after(Queue&) { return Status::success(); }
  // Makes a queue for a branch of a recording, with working memory of its own and the faults of this queue. Null
  // where there are no branches: this queue's own order is always correct.
  virtual std::shared_ptr<Queue> branch() { return nullptr; }
  // Captures into `graph` what `launches` launches here and on `branches`, instead of running it. A queue without
  // graphs leaves `graph` empty and does not call `launches`.
  virtual Status capture(const std::function<Status()>&, const Queues& /* branches */, std::unique_ptr<Graph>&) {
    return Status::success();
  }
};

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
  // Null when the device has no room for another queue.
  virtual std::shared_ptr<Queue> create_queue() = 0;

  // Host memory for a copy, pinned if pinned memory is left. Null when it does not fit.
  virtual std::shared_ptr<HostMemory> host_memory(size_t bytes) { return HostMemory::allocate(bytes); }
  // Copies in the queue's order. A copy of pinned memory returns at once and holds the memory; the bytes of a
  // download have arrived at a moment that is marked after it. A copy of other host memory is done on return.
  virtual Status upload(void* to, const std::shared_ptr<HostMemory>& from, Queue& queue) = 0;
  virtual Status download(const std::shared_ptr<HostMemory>& to, const void* from, Queue& queue) = 0;
  // Copies within the device's memory, in the queue's order.
  virtual Status copy(void* to, const void* from, size_t bytes, Queue& queue) = 0;

  // Memory for a tensor, at least 64-byte aligned. Null when it does not fit.
  void* allocate(size_t bytes);
  // Copies contents into memory that was just allocated. The caller may change `contents` after the return.
  virtual Status fill(void* data, const void* contents, size_t bytes) = 0;
  // Allocations and first contents have an order of their own. `stamp()` is the number of the newest allocation.
  // After `join(queue, stamp)`, the queue's work runs after all allocations up to that stamp.
  uint64_t stamp() { return stamps_.fetch_add(1) + 1; }
  virtual Status join(Queue&, uint64_t) { return Status::success(); }
  // `uses` are the queues whose launched work may still use the memory. The caller does not wait for that work.
  void release(void* data, size_t bytes, const Queues& uses);
  // Address range for a HostPool. Null, with the reason in `status`, when the device refuses that much. On the CPU
  // this is plain memory, counted like tensors.
  virtual std::shared_ptr<HostRange> host_range(size_t bytes, Status& status);
  // Calls `release` when what was launched on `uses` so far is done. The caller does not wait. `release` must not own
  // the device.
  virtual void when_done(const Queues& /* uses */, std::function<void()> release) { release(); }
  void count_finalized() { finalized_.fetch_add(1, std::memory_order_relaxed); }
  MemoryReport memory();

  Workers& workers() { return workers_; }
  Isa isa() const { return isa_; }

  // The lock that is held while an operation is launched. The streams of a device take turns; on the CPU they share
  // its workers.
  std::mutex& turn() { return turn_; }
  // Runs a host part that CUDA calls. Such host parts take turns among themselves, never with launches.
  Status run_on_workers(const HostPart& part);

 protected:
  virtual size_t scratch_bytes() const { return workers_.scratch_bytes(); }
  virtual size_t pinned_bytes() const { return 0; }
  virtual void* allocate_memory(size_t bytes) = 0;
  virtual void release_memory(void* data, const Queues& uses) = 0;

  uint64_t latest_stamp() const { return stamps_.load(); }

 private:
  Workers workers_;
  Isa isa_;
  std::mutex turn_;
  std::mutex host_turn_;
  std::mutex accounts_;
  size_t live_ = 0;
  size_t peak_ = 0;
  size_t limit_;
  std::atomic<uint64_t> finalized_{0};
  std::atomic<uint64_t> stamps_{0};
};

size_t physical_memory();

// A `memory_limit` of 0 means all memory that the device has.
std::shared_ptr<Device> create_cpu_device(int threads, Isa isa, size_t memory_limit);

}  // namespace kv
