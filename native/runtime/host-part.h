// A host part is what an operation does on the host between its kernels, in the order of its queue.
//
//   Status attend(const Arguments& a, ExecutionContext& context) {
//     Status status = launch_scores(a, context);
//     if (status.ok()) status = context.queue->run_on_host([a](HostContext& host) { return sum(a, host); }, context);
//     return status.ok() ? launch_merge(a, context) : status;
//   }
//
// A host part reads and writes memory that the operation holds, by plain address: host tensors or wrapped memory. It
// must not call CUDA. The destructors of what it captures must not call CUDA either.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/isa.h"
#include "runtime/status.h"
#include "runtime/workers.h"

namespace kv {

class Device;

struct HostContext {
  Workers& workers;
  Isa isa = Isa::baseline;
};

using HostPart = std::function<Status(HostContext&)>;

// The first failure of a queue's host parts. Once one has failed, the host parts behind it are skipped. A device
// cannot read the message, so it copies the flag, in the order of its queue.
class HostFailure {
 public:
  using Flag = std::atomic<int32_t>;

  // `flag` must be 0.
  explicit HostFailure(std::shared_ptr<Flag> flag) : flag_(std::move(flag)) {}

  void report(Status failure);
  // Success if no host part has failed.
  Status status() const;
  bool raised() const { return flag_->load() != 0; }
  const Flag* flag() const { return flag_.get(); }

 private:
  std::shared_ptr<Flag> flag_;
  mutable std::mutex mutex_;
  Status status_;
};

// A host part that a queue has launched. The queue keeps it until `done`; a graph keeps it as long as the graph may
// run it.
class HostTask {
 public:
  // `device` outlives the run, because a queue that is closed waits for the host parts that have begun.
  HostTask(Device& device, std::shared_ptr<HostFailure> failure, const char* operation, HostPart part)
      : device_(device), failure_(std::move(failure)), operation_(operation), part_(std::move(part)) {}

  // Called on a thread of the device's choice. Never throws.
  void run();
  bool done() const { return done_.load(); }

 private:
  Device& device_;
  std::shared_ptr<HostFailure> failure_;
  const char* operation_;
  HostPart part_;
  std::atomic<bool> done_{false};
};

}  // namespace kv
