// Counts the thread blocks that have done their share. Device code.
#pragma once

#include <cuda/atomic>

namespace kv {

// One thread of each of `count` thread blocks calls this when the block's part is done. Returns true for the last
// one. What the others wrote before is then visible to it, and the counter is zero again.
__device__ inline bool arrives_last(unsigned& arrivals, unsigned count) {
  const ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> arrived(arrivals);
  if (arrived.fetch_add(1, ::cuda::memory_order_acq_rel) + 1 < count) return false;
  arrived.store(0, ::cuda::memory_order_relaxed);
  return true;
}

}  // namespace kv
