// The memory behind a tensor. Every tensor and every enqueued operation that uses it shares ownership,
// so memory goes back exactly when the last of them is done.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/device.h"

namespace kv {

// Memory that belongs to someone else.
struct BorrowedMemory {
  void* data = nullptr;
  size_t bytes = 0;
  bool writable = true;
  // Whether it is still where it was. Empty: always.
  std::function<bool()> in_place;
  // Runs when neither host nor device use it any more, on any thread.
  std::function<void()> release;
  // Whether the device, too, reads and writes it by address: a piece of a HostPool.
  bool reachable = false;
};

class Storage {
 public:
  // Null when the memory does not fit.
  static std::shared_ptr<Storage> allocate(std::shared_ptr<Device> device, size_t bytes) {
    void* data = device->allocate(bytes);
    if (data == nullptr) return nullptr;
    auto storage = std::make_shared<Storage>(std::move(device), BorrowedMemory{data, bytes, true, nullptr, nullptr});
    storage->owns_memory_ = true;
    storage->stamp_ = storage->device_->stamp();
    return storage;
  }

  // Its first contents, `bytes()` of them, before anything uses it.
  Status fill(const void* contents) {
    const Status status = device_->fill(memory_.data, contents, memory_.bytes);
    stamp_ = device_->stamp();
    return status;
  }

  Storage(std::shared_ptr<Device> device, BorrowedMemory memory)
      : device_(std::move(device)), memory_(std::move(memory)) {}

  ~Storage() {
    if (owns_memory_) device_->release(memory_.data, memory_.bytes, uses_);
    if (memory_.release) device_->when_done(uses_, std::move(memory_.release));
  }

  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return memory_.data; }
  size_t bytes() const { return memory_.bytes; }
  bool writable() const { return memory_.writable; }
  // On the thread that made it.
  bool in_place() const { return !memory_.in_place || memory_.in_place(); }
  Device& device() const { return *device_; }

  // Whether the host reads and writes the memory.
  bool on_host() const { return !owns_memory_ || device_->kind() == DeviceKind::cpu; }

  // Whether its device does, by address.
  bool on_device() const { return owns_memory_ || memory_.reachable || device_->kind() == DeviceKind::cpu; }

  // Work that uses the memory is about to be launched on `queue`; not if this fails.
  Status used_on(const std::shared_ptr<Queue>& queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(uses_.begin(), uses_.end(), queue) != uses_.end()) return Status::success();
    uses_.push_back(queue);
    return owns_memory_ ? device_->join(*queue, stamp_) : Status::success();
  }

 private:
  std::shared_ptr<Device> device_;
  BorrowedMemory memory_;
  bool owns_memory_ = false;
  uint64_t stamp_ = 0;
  std::mutex mutex_;
  Queues uses_;
};

}  // namespace kv
