// A place where tensors live and operations run, with its memory accounts.
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
  size_t pinned = 0;       // host memory: what copies go through, and host pools
  size_t limit = 0;        // allocations past this are refused
  uint64_t finalized = 0;  // tensors that the garbage collector had to release: leaks
};

// The moment at which everything launched on a queue so far is done.
class Moment {
 public:
  virtual ~Moment() = default;
  // The first failure up to it, or success; nothing while it has not come.
  virtual std::optional<Status> poll() = 0;
  virtual Status wait() = 0;
};

// Work that a queue launches at one stroke.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual Status launch() = 0;
};

class Queue;
using Queues = std::vector<std::shared_ptr<Queue>>;

// What orders the work of one stream on a device: a CUDA stream; nothing on the CPU.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  virtual ~Queue() = default;
  virtual void* cuda_stream() const { return nullptr; }
  virtual Fault* fault() const { return nullptr; }
  // Memory of the device that stays this queue's, for work in its order; null when it does not fit.
  virtual void* workspace(size_t) { return nullptr; }
  // The same, all zero whenever an operation gets it: each leaves it so.
  virtual void* zeroed_workspace(size_t) { return nullptr; }
  // Runs a host part of an operation, here where work is done when its launch returns. It never needs the device's turn
  // elsewhere, so that a slow one keeps no other stream from launching.
  virtual Status run_on_host(HostPart part, ExecutionContext& context) {
    HostContext host{context.workers, context.isa};
    return part(host);
  }
  // Nothing more is launched: host parts that have not begun never do, and those that have are waited for.
  virtual void close() {}
  // Null where work is done when its launch returns.
  virtual std::shared_ptr<Moment> mark() { return nullptr; }
  // The same without faults, for any thread.
  virtual std::shared_ptr<Moment> mark_launched() { return nullptr; }
  // What is launched here from now on comes after a moment of another queue of the device.
  virtual Status run_after(const Moment&) { return Status::success(); }
  // The same after all that is launched on `other` so far, in a capture too.
  virtual Status run_after(Queue&) { return Status::success(); }
  // An order beside this one for part of a recording, with working memory of its own and this queue's faults. Null
  // where there is none: this queue's own order is always right.
  virtual std::shared_ptr<Queue> branch() { return nullptr; }
  // Puts what `launches` launches here and on `branches` into `graph` instead of running it. Where a queue has no
  // graphs, it leaves `graph` empty and does not call `launches`.
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
  // Null when the device has no room for one more.
  virtual std::shared_ptr<Queue> create_queue() = 0;

  // Host memory for a copy, pinned where there is some left; null when it does not fit.
  virtual std::shared_ptr<HostMemory> host_memory(size_t bytes) { return HostMemory::allocate(bytes); }
  // Copies in the queue's order. One of pinned memory goes on while the caller does, and holds that memory; what a
  // download brings is there at a moment marked after it. With other host memory a copy is done on return.
  virtual Status upload(void* to, const std::shared_ptr<HostMemory>& from, Queue& queue) = 0;
  virtual Status download(const std::shared_ptr<HostMemory>& to, const void* from, Queue& queue) = 0;
  // Within the device's memory, in the queue's order.
  virtual Status copy(void* to, const void* from, size_t bytes, Queue& queue) = 0;

  // Memory for a tensor, 64-byte aligned at least; null when it does not fit.
  void* allocate(size_t bytes);
  // Copies contents into memory just allocated. `contents` may be changed on return.
  virtual Status fill(void* data, const void* contents, size_t bytes) = 0;
  // Allocations and their contents are in order for themselves: `stamp()` counts how far that is, and from
  // `join(queue, stamp)` on the queue's work comes after what was there then.
  uint64_t stamp() { return stamps_.fetch_add(1) + 1; }
  virtual Status join(Queue&, uint64_t) { return Status::success(); }
  // `uses` are the queues whose launched work may still use the memory; it is not waited for.
  void release(void* data, size_t bytes, const Queues& uses);
  // Addresses for a HostPool. Null, with the reason in `status`, when the device refuses that much. On the CPU it is plain
  // memory, counted as tensors are.
  virtual std::shared_ptr<HostRange> host_range(size_t bytes, Status& status);
  // Calls `release` when what was launched on `uses` so far is done, and waits for nothing. `release` owns no device.
  virtual void when_done(const Queues& /* uses */, std::function<void()> release) { release(); }
  void count_finalized() { finalized_.fetch_add(1, std::memory_order_relaxed); }
  MemoryReport memory();

  Workers& workers() { return workers_; }
  Isa isa() const { return isa_; }

  // Held while an operation is launched: the streams of a device take turns, on the CPU on its workers.
  std::mutex& turn() { return turn_; }
  // For host parts that no launch runs. They take turns among themselves only.
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

// `memory_limit` 0 means all that the device has.
std::shared_ptr<Device> create_cpu_device(int threads, Isa isa, size_t memory_limit);

}  // namespace kv
