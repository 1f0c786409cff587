// The 32-bit address that instructions on shared memory take.
#pragma once

#include <cstdint>

namespace kv::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace kv::ptx
