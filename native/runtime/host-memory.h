// Host memory that is copied to a device or from it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

#include "runtime/status.h"

namespace kv {

// Address range of host memory that a device reaches. Its pages are made slab by slab.
class HostRange {
 public:
  static constexpr size_t kSlabBytes = size_t{64} << 20;

  HostRange(char* begin, size_t size) : data(begin), bytes(size) {}
  virtual ~HostRange() = default;
  HostRange(const HostRange&) = delete;
  HostRange& operator=(const HostRange&) = delete;

  // Makes the pages of the next slab, which takes time. The last slab may be smaller than the others.
  virtual Status make(size_t offset, size_t slab_bytes) = 0;

  char* const data;
  const size_t bytes;
};

struct HostMemory {
  char* data = nullptr;
  size_t bytes = 0;
  bool pinned = false;     // a copy of it need not be waited for
  bool reachable = false;  // part of a HostPool, which keeps it until the device is done; not waited for either

  // Memory that someone else owns and that is only read. It must outlive the copies.
  static std::shared_ptr<HostMemory> borrow(const void* data, size_t bytes, bool reachable = false) {
    return std::shared_ptr<HostMemory>(new HostMemory{static_cast<char*>(const_cast<void*>(data)), bytes, false, reachable});
  }

  // Null when there is no memory.
  static std::shared_ptr<HostMemory> allocate(size_t bytes) {
    auto* data = static_cast<char*>(std::malloc(bytes == 0 ? 1 : bytes));
    if (data == nullptr) return nullptr;
    return std::shared_ptr<HostMemory>(new HostMemory{data, bytes}, [](HostMemory* memory) {
      std::free(memory->data);
      delete memory;
    });
  }
};

}  // namespace kv
