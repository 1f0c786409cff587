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

class Storage {
 public:
  // Null when the memory does not fit.
  static std::shared_ptr<Storage> allocate(std::shared_ptr<Device> device, size_t bytes) {
    void* data = device->allocate(bytes);
    if (data == nullptr) return nullptr;
    auto storage = std::make_shared<Storage>(std::move(device), data, bytes, nullptr);
    storage->owns_memory_ = true;
    storage->stamp_ = storage->device_->stamp();
    return storage;
  }

  // Its first contents, `bytes()` of them, before anything uses it.
  Status fill(const void* contents) {
    const Status status = device_->fill(data_, contents, bytes_);
    stamp_ = device_->stamp();
    return status;
  }

  // Wraps memory that belongs to someone else; `release` runs when nothing uses it any more.
  Storage(std::shared_ptr<Device> device, void* data, size_t bytes, std::function<void()> release)
      : device_(std::move(device)), data_(data), bytes_(bytes), release_(std::move(release)) {}

  ~Storage() {
    if (owns_memory_) device_->release(data_, bytes_, uses_);
    if (release_) release_();
  }

  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  Device& device() const { return *device_; }

  // Whether the host reads and writes the memory.
  bool on_host() const { return !owns_memory_ || device_->kind() == DeviceKind::cpu; }

  // Work that uses the memory is about to be launched on `queue`; not if this fails.
  Status used_on(const std::shared_ptr<Queue>& queue) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(uses_.begin(), uses_.end(), queue) != uses_.end()) return Status::success();
    uses_.push_back(queue);
    return owns_memory_ ? device_->join(*queue, stamp_) : Status::success();
  }

 private:
  std::shared_ptr<Device> device_;
  void* data_;
  size_t bytes_;
  std::function<void()> release_;
  bool owns_memory_ = false;
  uint64_t stamp_ = 0;
  std::mutex mutex_;
  Queues uses_;
};

}  // namespace kv
