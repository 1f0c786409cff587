// Host memory that a device's kernels and copies reach by address, of which tensors take pieces. Making it takes time
// (pinning 2 GiB takes 0.7 s), so it is made slab by slab, away from the JavaScript thread.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/device.h"
#include "runtime/free-ranges.h"
#include "runtime/storage.h"

namespace kv {

class HostPool {
 public:
  // Null, with the reason in `status`, when the device refuses that much. Nothing is made yet.
  static std::shared_ptr<HostPool> create(std::shared_ptr<Device> device, size_t bytes, Status& status);
  HostPool(std::shared_ptr<Device> device, std::shared_ptr<HostRange> range);
  // The memory goes once the device is done with the last piece.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  Device& device() const { return *device_; }
  size_t bytes() const { return memory_->range->bytes; }

  // Not from several threads at a time.
  Status make_slab();
  size_t made() const { return made_; }

  // A piece of at least `bytes`, which comes back when the device is done with it. Null when there is no room for it in
  // one piece, or the pool is not wholly made.
  std::shared_ptr<Storage> take(size_t bytes);
  size_t available() const;

 private:
  // What pieces that are on their way back own. Not the device: it waits for them before it goes.
  struct Memory {
    explicit Memory(std::shared_ptr<HostRange> whole) : range(std::move(whole)), free(range->bytes) {}
    std::shared_ptr<HostRange> range;
    std::mutex mutex;
    FreeRanges free;
  };

  std::shared_ptr<Device> device_;
  std::shared_ptr<Memory> memory_;
  size_t made_ = 0;
};

}  // namespace kv
