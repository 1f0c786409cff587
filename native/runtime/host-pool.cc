#include "runtime/host-pool.h"

#include <algorithm>
#include <utility>

namespace kv {
namespace {

// The same alignment as cudaMalloc's.
constexpr size_t kAlignment = 256;

constexpr size_t rounded(size_t bytes) { return (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

std::shared_ptr<HostPool> HostPool::create(std::shared_ptr<Device> device, size_t bytes, Status& status) {
  std::shared_ptr<HostRange> range = device->host_range(rounded(bytes), status);
  return range == nullptr ? nullptr : std::make_shared<HostPool>(std::move(device), std::move(range));
}

HostPool::HostPool(std::shared_ptr<Device> device, std::shared_ptr<HostRange> range)
    : device_(std::move(device)), memory_(std::make_shared<Memory>(std::move(range))) {}

// Pinned memory takes as long to free as to make, so the device's own thread frees it. All tensors have returned
// their memory by now.
HostPool::~HostPool() {
  device_->when_done({}, [memory = std::move(memory_)]() mutable { memory.reset(); });
}

Status HostPool::make_slab() {
  const size_t slab = std::min(HostRange::kSlabBytes, bytes() - made_);
  const Status status = memory_->range->make(made_, slab);
  if (status.ok()) made_ += slab;
  return status;
}

std::shared_ptr<Storage> HostPool::take(size_t wanted) {
  if (made_ < bytes() || wanted > bytes()) return nullptr;
  const size_t size = rounded(wanted);
  std::optional<size_t> offset;
  {
    std::lock_guard<std::mutex> lock(memory_->mutex);
    offset = memory_->free.take(size);
  }
  if (!offset.has_value()) return nullptr;
  const auto give_back = [memory = memory_, at = *offset, size] {
    std::lock_guard<std::mutex> lock(memory->mutex);
    memory->free.give_back(at, size);
  };
  constexpr bool kWritable = true;
  constexpr bool kReachable = true;
  return std::make_shared<Storage>(
      device_, BorrowedMemory{memory_->range->data + *offset, wanted, kWritable, nullptr, give_back, kReachable});
}

size_t HostPool::available() const {
  std::lock_guard<std::mutex> lock(memory_->mutex);
  return memory_->free.available();
}

}  // namespace kv
