// Host memory that a device's kernels and copies reach by address. Tensors take parts of it. Pinning takes time
// (0.7 s for 2 GiB), so the pool is made slab by slab, off the JavaScript thread.
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
  // Null, with the reason in `status`, when the device refuses that much. No memory is made yet.
  static std::shared_ptr<HostPool> create(std::shared_ptr<Device> device, size_t bytes, Status& status);
  HostPool(std::shared_ptr<Device> device, std::shared_ptr<HostRange> range);
  // The memory is freed once the device is done with the last tensor in it.
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  Device& device() const { return *device_; }
  size_t bytes() const { return memory_->range->bytes; }

  // Makes the next slab. Must not be called by several threads at a time.
  Status make_slab();
  size_t made() const { return made_; }

  // Memory of at least `bytes`, which returns to the pool when the device is done with it. Null when no free range is
  // large enough, or when not all slabs are made yet.
  std::shared_ptr<Storage> take(size_t bytes);
  size_t available() const;

 private:
  // Owned by the tensors' memory as well, which may return later than the pool goes. It does not own the device,
  // which waits for such memory before it is destroyed.
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
