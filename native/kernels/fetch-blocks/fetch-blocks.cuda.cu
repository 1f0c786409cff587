// Loads by plain reads of host memory, for blocks and devices that bulk copies do not take; and the choice between the two.
#include "kernels/fetch-blocks/fetch-blocks.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 512;
constexpr unsigned kThreadBlocks = 16;  // fill the link; fewer do not

template <class Unit>
__global__ void __launch_bounds__(kThreads) load_blocks(const __grid_constant__ FetchBlocksArguments a, const FaultSink faults) {
  const int count = cuda::checked_loads(a, faults);
  const int64_t units = a.block_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int i = static_cast<int>(blockIdx.x); i < 2 * count; i += static_cast<int>(gridDim.x)) {
    const int load = i / 2;
    if (!a.names_blocks(load)) {
      report_fault(faults, FetchBlocksFault::block_out_of_range, load);
      continue;
    }
    const Unit* from = static_cast<const Unit*>(i % 2 == 0 ? a.host_keys : a.host_values) + a.loads[load] * units;
    Unit* to = static_cast<Unit*>(i % 2 == 0 ? a.keys : a.values) + a.loads[a.most_loads + load] * units;
    for (int64_t unit = threadIdx.x; unit < units; unit += kThreads) to[unit] = from[unit];
  }
}

}  // namespace

Status fetch_blocks_cuda(const FetchBlocksArguments& a, ExecutionContext& context) {
  const FaultSink faults = context.faults(describe_fetch_blocks_fault);
  cudaStream_t stream = stream_of(context);
  int major = 0;
  const Status status = find_compute_capability(major);
  if (!status.ok()) return status;
  const uintptr_t all = reinterpret_cast<uintptr_t>(a.host_keys) | reinterpret_cast<uintptr_t>(a.host_values) |
                        reinterpret_cast<uintptr_t>(a.keys) | reinterpret_cast<uintptr_t>(a.values) |
                        static_cast<uintptr_t>(a.block_bytes);
  if (major >= 9 && all % 16 == 0) return cuda::fetch_blocks_bulk(a, faults, stream);
  if (all % 16 == 0) load_blocks<uint4><<<kThreadBlocks, kThreads, 0, stream>>>(a, faults);
  else load_blocks<uint16_t><<<kThreadBlocks, kThreads, 0, stream>>>(a, faults);
  return launch_status();
}

}  // namespace kv
