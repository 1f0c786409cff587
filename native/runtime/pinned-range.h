// Pinned host memory of a HostPool: addresses first, then pages slab by slab, so that a driver that pins keeps nobody
// waiting for long.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "runtime/host-memory.h"
#include "runtime/status.h"

namespace kv {

class PinnedRange : public HostRange {
 public:
  // Null, with the reason in `status`, past what the process may lock. `pinned` counts the bytes of all ranges,
  // from here on.
  static std::shared_ptr<PinnedRange> create(size_t bytes, std::shared_ptr<std::atomic<size_t>> pinned, Status& status);
  PinnedRange(char* addresses, size_t bytes, std::shared_ptr<std::atomic<size_t>> pinned);
  ~PinnedRange() override;

  Status make(size_t offset, size_t slab_bytes) override;

 private:
  size_t made_ = 0;
  std::shared_ptr<std::atomic<size_t>> pinned_;
};

}  // namespace kv
