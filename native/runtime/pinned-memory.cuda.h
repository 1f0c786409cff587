// Pinned host memory for copies that nobody waits for. A device has a fixed amount, made once, in slabs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>

#include "runtime/host-memory.h"
#include "runtime/slabs.h"

namespace kv {

class PinnedMemory : public std::enable_shared_from_this<PinnedMemory> {
 public:
  // If the host has no memory to pin, every `take` returns null.
  PinnedMemory();
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  size_t bytes() const { return memory_ == nullptr ? 0 : kSlabs * kSlabBytes; }

  // Null when `bytes` is more than a slab has, or when no slab has room.
  std::shared_ptr<HostMemory> take(size_t bytes);

  // Holds `memory` until all that `stream` has been given so far is done.
  void hold(std::shared_ptr<HostMemory> memory, cudaStream_t stream);

  // Waits for all copies that hold memory.
  void drain();

 private:
  static constexpr size_t kSlabBytes = size_t{2} << 20;
  static constexpr size_t kSlabs = 8;

  struct Copy {
    std::shared_ptr<HostMemory> memory;
    cudaEvent_t done;
  };

  void let_go_of_done();

  char* memory_;
  Slabs slabs_;
  std::mutex mutex_;
  std::deque<Copy> copies_;
};

}  // namespace kv
