#include "runtime/device.h"

#include <algorithm>

namespace kv {
namespace {

class PlainRange : public HostRange {
 public:
  PlainRange(Device& device, char* data, size_t bytes) : HostRange(data, bytes), device_(device) {}
  ~PlainRange() override { device_.release(data, bytes, {}); }
  Status make(size_t, size_t) override { return Status::success(); }

 private:
  Device& device_;  // owned by the user of this object
};

}  // namespace

void* ExecutionContext::workspace(size_t bytes) const { return queue->workspace(bytes); }

void* ExecutionContext::zeroed_workspace(size_t bytes) const { return queue->zeroed_workspace(bytes); }

Device::Device(int threads, Isa isa, size_t memory_limit) : workers_(threads), isa_(isa), limit_(memory_limit) {}

void* Device::allocate(size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(accounts_);
    if (bytes > limit_ || live_ > limit_ - bytes) return nullptr;
    live_ += bytes;
    peak_ = std::max(peak_, live_);
  }
  void* data = allocate_memory(bytes);
  if (data == nullptr) {
    std::lock_guard<std::mutex> lock(accounts_);
    live_ -= bytes;
  }
  return data;
}

void Device::release(void* data, size_t bytes, const Queues& uses) {
  release_memory(data, uses);
  std::lock_guard<std::mutex> lock(accounts_);
  live_ -= bytes;
}

std::shared_ptr<HostRange> Device::host_range(size_t bytes, Status& status) {
  void* data = allocate(bytes);
  if (data != nullptr) return std::make_shared<PlainRange>(*this, static_cast<char*>(data), bytes);
  const MemoryReport report = memory();
  status = Status::failure(StatusCode::out_of_memory,
                           std::to_string(bytes) + " bytes of host memory were asked for, where " +
                               std::to_string(report.live) + " of " + std::to_string(report.limit) +
                               " are in use. Ask for less, or raise memoryLimit.");
  return nullptr;
}

Status Device::run_on_workers(const HostPart& part) {
  std::lock_guard<std::mutex> turn(host_turn_);
  HostContext host{workers_, isa_};
  return part(host);
}

MemoryReport Device::memory() {
  std::lock_guard<std::mutex> lock(accounts_);
  return {live_, peak_, scratch_bytes(), pinned_bytes(), limit_, finalized_.load(std::memory_order_relaxed)};
}

}  // namespace kv
