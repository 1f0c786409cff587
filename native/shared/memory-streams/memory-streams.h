// How many streams of memory a thread should read at once. A linear layer of one row can read one row of its weights
// after the other, or several rows together. Which of these a core does fastest depends on the processor: how its
// prefetchers follow streams is not documented, so it is measured.
#pragma once

#include <functional>

#include "runtime/isa.h"

namespace kv {

constexpr int kMemoryStreams[] = {1, 2, 4};

// The fastest of kMemoryStreams for the kernels of `isa`, measured now on the calling thread: about 5 ms, and 20 ms at
// most unless the thread does not get its core. 1 if none is clearly faster.
int probe_memory_streams(Isa isa);

// Calls `use` with that number, which a process measures once for each instruction set, in the background. `use` is called
// here if the number is known, and on the measuring thread otherwise.
void when_memory_streams_known(Isa isa, std::function<void(int)> use);

}  // namespace kv
