// Copies by TMA of boxes of a tensor, which a tensor map describes (sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/shared-address.cuda.h"

namespace kv::ptx {

// Starts the copy of the box at (x, y, z), x innermost, to shared memory. Its bytes count on `barrier`.
__device__ inline void tensor_copy(void* shared, const CUtensorMap* map, int x, int y, int z,
                                   uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// The same copy, with a policy of L2.
__device__ inline void tensor_copy(void* shared, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// The same of a tensor of five axes.
__device__ inline void tensor_copy(void* shared, const CUtensorMap* map, const int (&at)[5], uint64_t* barrier,
                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
      "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Orders this thread's earlier accesses of shared memory before later ones by TMA and wgmma.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace kv::ptx
