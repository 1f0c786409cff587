#include "kernels/forget-blocks/forget-blocks.h"
#include "ptx/dependent-launch.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/entry-blocks.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

// A kv head of a slot in each column of thread blocks.
__global__ void __launch_bounds__(kThreads) forget_each(const __grid_constant__ ForgetBlocksArguments a, FaultSink faults) {
  ptx::follow_previous_kernel();
  const int64_t head = blockIdx.x;
  const int32_t count = a.key_counts[head];
  if (count < 0 || count > int64_t{a.table_width} * a.block_tokens) {
    if (threadIdx.x == 0) report_fault(faults, PagedFault::cache_overflow, head / a.kv_heads, 0, a.block_tokens);
    return;
  }
  const int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (i * a.block_tokens >= count) return;
  const int32_t block = checked_block(a.block_table[head * a.table_width + i], a.block_count, faults);
  if (block >= 0) a.where[block] = -1;
}

}  // namespace

Status forget_blocks_cuda(const ForgetBlocksArguments& a, ExecutionContext& context) {
  const dim3 blocks(static_cast<unsigned>(a.slot_count * a.kv_heads), (static_cast<unsigned>(a.table_width) + kThreads - 1) / kThreads);
  if (blocks.x == 0 || blocks.y == 0) return Status::success();
  return launch_overlapped(forget_each, blocks, dim3(kThreads), 0, stream_of(context), a, context.faults(describe_paged_fault));
}

}  // namespace kv
