// How the warpgroups of a thread block divide the work. Consumers compute. The first warp of the producer's warpgroup
// copies what they read. The producer gives registers to the consumers. Device code.
#pragma once

#include "ptx/register-shares.cuda.h"

namespace kv::sm90a {

constexpr int kWarpgroupThreads = 128;

// These register counts add up to what a multiprocessor has.
template <int kConsumers>
struct WarpRoles {
  static_assert(kConsumers == 2 || kConsumers == 3);
  static constexpr int kConsumerWarpgroups = kConsumers;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kThreads = kWarpgroupThreads * (1 + kConsumers);
};

// The first warpgroup is the producer's: one warp of it runs Producer. All threads of the consumers run Consumer.
template <class Roles, class Producer, class Consumer, class Parameters, class Storage>
__device__ void run_roles(const Parameters& parameters, Storage& shared) {
  if (threadIdx.x < kWarpgroupThreads) {
    ptx::shrink_registers<Roles::kProducerRegisters>();
    if (threadIdx.x < 32) Producer(parameters, shared).run();
  } else {
    ptx::grow_registers<Roles::kConsumerRegisters>();
    Consumer(parameters, shared).run();
  }
}

}  // namespace kv::sm90a
