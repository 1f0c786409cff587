// Copies of contiguous bytes between global and shared memory by TMA (sm_90).
#pragma once

#include <cstdint>

#include "ptx/shared-address.cuda.h"

namespace kv::ptx {

// Whether the GPU that this is compiled for has these copies, for `if constexpr`.
__device__ constexpr bool has_bulk_copy() {
#if __CUDA_ARCH__ >= 900
  return true;
#else
  return false;
#endif
}

// Starts the copy. Its bytes count on `barrier`. Both addresses and `bytes` are multiples of 16.
__device__ inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// The same copy, with a policy of L2.
__device__ inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                 uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Starts a copy from shared memory, which belongs to the next group that its thread commits. What ordinary instructions wrote
// there needs a fence first; what bulk copies brought does not.
__device__ inline void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

__device__ inline void bulk_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the newest kGroups groups have been read from shared memory, or written.
template <int kGroups>
__device__ inline void bulk_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}
template <int kGroups>
__device__ inline void bulk_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace kv::ptx
