// Per-thread asynchronous copies from global to shared memory (sm_80).
#pragma once

#include <cstdint>

#include "ptx/shared-address.cuda.h"

namespace kv::ptx {

// Copies 16 bytes past L1, or writes 16 zero bytes when `valid` is false.
__device__ inline void async_copy_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Makes lines that are read once leave L2 first.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// As above, with a policy of L2.
__device__ inline void async_copy_16(void* shared, const void* global, bool valid, uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
      "l"(global), "r"(valid ? 16 : 0), "l"(policy)
      : "memory");
}

// Brings `bytes` bytes, a multiple of 16, to L2 (sm_90; elsewhere it does nothing).
__device__ inline void prefetch(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// Brings the line that holds an address to L1.
__device__ inline void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global) : "memory");
}

__device__ inline void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of this thread's latest groups are still under way.
template <int kPending>
__device__ inline void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kv::ptx
