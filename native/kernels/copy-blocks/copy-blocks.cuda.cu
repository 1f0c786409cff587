#include "kernels/copy-blocks/copy-blocks.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

// One thread block copies one block of the pool. Each thread copies one `Unit` at a time.
template <class Unit>
__global__ void copy_each(CopyBlocksArguments a) {
  const int64_t units = a.block_bytes / int64_t{sizeof(Unit)};
  const Unit* from = static_cast<const Unit*>(a.pool) + a.from[blockIdx.x] * units;
  Unit* to = static_cast<Unit*>(a.pool) + a.to[blockIdx.x] * units;
  for (int64_t i = threadIdx.x; i < units; i += blockDim.x) to[i] = from[i];
}

}  // namespace

Status copy_blocks_cuda(const CopyBlocksArguments& a, ExecutionContext& context) {
  const bool in_vectors = (reinterpret_cast<uintptr_t>(a.pool) | static_cast<uintptr_t>(a.block_bytes)) % 16 == 0;
  const auto grid = static_cast<unsigned>(a.copies);
  if (in_vectors) copy_each<uint4><<<grid, 256, 0, stream_of(context)>>>(a);
  else copy_each<char><<<grid, 256, 0, stream_of(context)>>>(a);
  return launch_status();
}

}  // namespace kv
