// A ring of shared-memory stages that a producer fills and consumers read.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuda.h"

namespace kv {

// The next stage, and the parity of its mbarriers in this round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kStages>
struct StageRing {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  __device__ void init(int consumer_warps, int producer_arrivals = 1) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(&full[stage], producer_arrivals);
      ptx::mbarrier_init(&empty[stage], consumer_warps);
    }
  }

  // For the producer. The first round does not wait: the previous phase of a new mbarrier counts as complete.
  __device__ void wait_empty(RingPosition<kStages> at) {
    ptx::mbarrier_wait(&empty[at.stage], at.parity ^ 1);
  }

  __device__ void wait_full(RingPosition<kStages> at) { ptx::mbarrier_wait(&full[at.stage], at.parity); }

  // Whether wait_full would return at once in all lanes of a warp.
  __device__ bool is_full(RingPosition<kStages> at) {
    return __all_sync(0xffffffffu, ptx::mbarrier_test(&full[at.stage], at.parity));
  }

  // For rings on which every thread of the producers and consumers arrives. An arrival says that the thread has done
  // its part.
  __device__ void fill_by_thread(RingPosition<kStages> at) { ptx::mbarrier_arrive(&full[at.stage]); }
  __device__ void release_by_thread(RingPosition<kStages> at) { ptx::mbarrier_arrive(&empty[at.stage]); }

  // For consumers: one arrival for each warp. An instruction that waits for the reads of all lanes must come before
  // it.
  __device__ void release(RingPosition<kStages> at) {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&empty[at.stage]);
  }
};

}  // namespace kv
