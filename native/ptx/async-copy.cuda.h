// Per-thread asynchronous copies from global to shared memory (sm_80).
#pragma once

#include <cstdint>

#include "ptx/shared-address.cuda.h"

namespace kv::ptx {

// Copies 16 bytes and bypasses L1. Writes 16 zero bytes instead if `valid` is false.
__device__ inline void async_copy_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

// An L2 policy for lines that are read once: L2 evicts them first. It is what createpolicy.fractional.L2::evict_first
// gives on sm_80 and on sm_90. A constant needs no moves between registers ahead of each copy.
__device__ constexpr uint64_t evict_first_policy() { return 0x12f0000000000000u; }

// The same copy, with a policy of L2.
__device__ inline void async_copy_16(void* shared, const void* global, bool valid, uint64_t policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
      "l"(global), "r"(valid ? 16 : 0), "l"(policy)
      : "memory");
}

// Prefetches `bytes` bytes, a multiple of 16, into L2. Does nothing before sm_90.
__device__ inline void prefetch(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

// Prefetches the cache line that holds an address into L1.
__device__ inline void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(global) : "memory");
}

__device__ inline void prefetch_line_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

__device__ inline void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of the groups that this thread committed last are unfinished.
template <int kPending>
__device__ inline void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace kv::ptx
