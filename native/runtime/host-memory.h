// Bytes of the host on their way to a device or from it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace kv {

struct HostMemory {
  char* data = nullptr;
  size_t bytes = 0;
  bool pinned = false;  // copies of it need not be waited for

  // Someone else's, to read from; outlive the copies.
  static std::shared_ptr<HostMemory> borrow(const void* data, size_t bytes) {
    return std::shared_ptr<HostMemory>(new HostMemory{static_cast<char*>(const_cast<void*>(data)), bytes, false});
  }

  // Null when it does not fit.
  static std::shared_ptr<HostMemory> allocate(size_t bytes) {
    auto* data = static_cast<char*>(std::malloc(bytes == 0 ? 1 : bytes));
    if (data == nullptr) return nullptr;
    return std::shared_ptr<HostMemory>(new HostMemory{data, bytes, false}, [](HostMemory* memory) {
      std::free(memory->data);
      delete memory;
    });
  }
};

}  // namespace kv
