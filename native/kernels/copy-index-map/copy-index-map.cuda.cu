#include "kernels/copy-index-map/copy-index-map.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

// Each thread copies one entry.
__global__ void __launch_bounds__(kThreads) copy_entries(CopyIndexMapArguments a, int64_t entries) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const unsigned operand = blockIdx.y;
  if (i < entries) a.target[operand][i] = copied_entry(a, a.source[operand][i]);
}

}  // namespace

Status copy_index_map_cuda(const CopyIndexMapArguments& a, ExecutionContext& context) {
  const int64_t entries = int64_t{a.kv_heads} * a.table_width;
  const dim3 grid(static_cast<unsigned>((entries + kThreads - 1) / kThreads), 2);
  copy_entries<<<grid, kThreads, 0, stream_of(context)>>>(a, entries);
  return launch_status();
}

}  // namespace kv
