// Launchers of loads of listed blocks on CUDA devices. They enqueue on `stream` and return.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/fetch-blocks/fetch-blocks.h"

namespace kv::cuda {

// By bulk copies through shared memory, in few thread blocks. Blocks begin at multiples of 16 bytes.
Status fetch_blocks_bulk(const FetchBlocksArguments& arguments, FaultSink faults, cudaStream_t stream);

#ifdef __CUDACC__
// The length of the list, or 0 and a fault.
__device__ inline int checked_loads(const FetchBlocksArguments& a, FaultSink faults) {
  const int32_t count = *a.load_count;
  if (count >= 0 && count <= a.most_loads) return count;
  report_fault(faults, FetchBlocksFault::count_out_of_range, count, 0, a.most_loads);
  return 0;
}
#endif

}  // namespace kv::cuda
