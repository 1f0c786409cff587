#include "runtime/host-part.h"

#include "runtime/device.h"

namespace kv {

void HostFailure::report(Status failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!status_.ok()) return;
  status_ = std::move(failure);
  flag_->store(1);
}

Status HostFailure::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

void HostTask::run() {
  if (!failure_->raised()) {
    Status status = guarded([&] { return device_.run_on_workers(part_); });
    if (status.operation == nullptr) status.operation = operation_;
    if (!status.ok()) failure_->report(std::move(status));
  }
  done_.store(true);
}

}  // namespace kv
