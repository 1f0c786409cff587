// Thread blocks of one cluster reach each other's shared memory (sm_90). Older devices have no clusters, so a cluster
// is one thread block there.
#pragma once

#include <cstdint>

#include "ptx/shared-address.cuda.h"

namespace kv::ptx {

// Returns when every thread of the cluster has called it. What the threads wrote before is visible after it.
__device__ inline void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Reads, from the shared memory of thread block `rank`, the 16 bytes at the place that `shared` has here. 16-byte
// aligned.
__device__ inline uint4 cluster_load(const void* shared, uint32_t rank) {
  uint4 value;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .u32 address;\n"
      "mapa.shared::cluster.u32 address, %4, %5;\n"
      "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [address];\n"
      "}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "r"(shared_address(shared)), "r"(rank)
      : "memory");
#else
  value = *static_cast<const uint4*>(shared);
#endif
  return value;
}

// Sends a pair to the shared memory of thread block `rank`, to the place that `shared` has here, and counts its bytes on the
// mbarrier there that has the place of `barrier`. 16-byte aligned.
__device__ inline void cluster_send(double2* shared, uint64_t* barrier, uint32_t rank, double2 pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .u32 address, counted;\n"
      "mapa.shared::cluster.u32 address, %0, %2;\n"
      "mapa.shared::cluster.u32 counted, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [address], {%3, %4}, [counted];\n"
      "}" ::"r"(shared_address(shared)),
      "r"(shared_address(barrier)), "r"(rank), "d"(pair.x), "d"(pair.y)
      : "memory");
#endif
}

// Arrives at the mbarrier of thread block `rank` that has the place of `barrier`.
__device__ inline void cluster_arrive(uint64_t* barrier, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .u32 address;\n"
      "mapa.shared::cluster.u32 address, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [address];\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
#endif
}

}  // namespace kv::ptx
