// Barriers among some warps of a thread block. Ids 1 to 15 name them; `threads` counts all threads that take part.
#pragma once

#include <cstdint>

namespace kv::ptx {

__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits like named_barrier_sync, and returns whether `value` is true in any of the threads.
__device__ inline bool named_barrier_any(int id, int threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred any, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

}  // namespace kv::ptx
