// Pinned host memory of a HostPool. Addresses are reserved first. Pages are pinned slab by slab, because the driver
// makes all other threads wait while it pins.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "runtime/host-memory.h"
#include "runtime/status.h"

namespace kv {

class PinnedRange : public HostRange {
 public:
  // Null, with the reason in `status`, when the process may not lock that much. `pinned` counts the bytes of all
  // ranges from their creation on.
  static std::shared_ptr<PinnedRange> create(size_t bytes, std::shared_ptr<std::atomic<size_t>> pinned, Status& status);
  PinnedRange(char* addresses, size_t bytes, std::shared_ptr<std::atomic<size_t>> pinned);
  ~PinnedRange() override;

  Status make(size_t offset, size_t slab_bytes) override;

 private:
  size_t made_ = 0;
  std::shared_ptr<std::atomic<size_t>> pinned_;
};

}  // namespace kv
