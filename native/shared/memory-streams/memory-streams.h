// How a thread should read memory. A linear layer of one row can read one row of its weights after the other, or several
// rows together, and ask for them in the first or in the second cache. What a core does fastest depends on the processor:
// how its prefetchers follow streams, and how much each cache can have on its way, is not documented, so it is measured.
#pragma once

#include <functional>

#include "runtime/isa.h"
#include "runtime/workers.h"

namespace kv {

constexpr MemoryReading kMemoryReadings[] = {{1, 1, 1}, {2, 1, 1}, {4, 1, 1}, {1, 2, 1}, {1, 2, kMostRequests}};

// The fastest of kMemoryReadings for the kernels of `isa`, measured now on the calling thread: about 10 ms. No round
// of all begins after 20 ms. The first if none is clearly faster.
MemoryReading probe_memory_reading(Isa isa);

// Calls `use` with what that found, which a process measures once for each instruction set, in the background. `use` is
// called here if it is known, and on the measuring thread otherwise.
void when_memory_reading_known(Isa isa, std::function<void(MemoryReading)> use);

}  // namespace kv
