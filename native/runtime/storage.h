// The memory behind a tensor. The tensor and every enqueued operation that uses the memory share its ownership, so
// the memory is freed exactly when the last of them is done.
#pragma once

#include <algorithm>
#include <atomic>
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
  // Whether JavaScript still has the memory at `data`. Empty means always.
  std::function<bool()> in_place;
  // Called on any thread when neither the host nor the device uses the memory any more.
  std::function<void()> release;
  // Whether the device reads and writes the memory by address: true for memory of a HostPool.
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

  // Copies `bytes()` bytes into the memory. Must be called before anything else uses the memory.
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
  // Whether an operation was ever enqueued of which a kernel or a host part writes to the memory. Until then it holds its
  // first contents, or what was copied to it before any kernel began that was launched behind the copy.
  bool written() const { return written_; }
  void mark_written() { written_ = true; }
  // Must be called on the thread that made the storage.
  bool in_place() const { return !memory_.in_place || memory_.in_place(); }
  Device& device() const { return *device_; }

  // Whether the host reads and writes the memory.
  bool on_host() const { return !owns_memory_ || device_->kind() == DeviceKind::cpu; }

  // Whether the device reads and writes the memory by address.
  bool on_device() const { return owns_memory_ || memory_.reachable || device_->kind() == DeviceKind::cpu; }

  // Must be called before work that uses the memory is launched on `queue`. If it fails, the work must not be
  // launched.
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
  std::atomic<bool> written_{false};
  uint64_t stamp_ = 0;
  std::mutex mutex_;
  Queues uses_;
};

}  // namespace kv
