#include "kernels/forget-blocks/forget-blocks.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"
#include "shared/paged/paged-faults.h"

namespace kv {

KV_CPU_KERNEL(forget_blocks, ForgetBlocksArguments)
KV_CUDA_KERNEL(forget_blocks, ForgetBlocksArguments)

static Status invalid(PagedFault code, int64_t value, int64_t limit) {
  Fault fault;
  fault.code = static_cast<int32_t>(code);
  fault.value = value;
  fault.limit = limit;
  return Status::failure(StatusCode::invalid_value, describe_paged_fault(fault));
}

Status forget_blocks(const ForgetBlocksArguments& arguments, ExecutionContext& context) {
  const ForgetBlocksArguments& a = arguments;
  if (context.device == DeviceKind::cuda) return forget_blocks_cuda(a, context);
  for (int64_t head = 0; head < int64_t{a.slot_count} * a.kv_heads; ++head) {
    const int32_t count = a.key_counts[head];
    if (count < 0 || count > int64_t{a.table_width} * a.block_tokens) return invalid(PagedFault::cache_overflow, head / a.kv_heads, a.block_tokens);
    for (int64_t i = 0; i * a.block_tokens < count; ++i) {
      const int32_t block = a.block_table[head * a.table_width + i];
      if (block < 0 || block >= a.block_count) return invalid(PagedFault::block_out_of_range, block, a.block_count);
    }
  }
  forget_blocks_cpu(a, context);
  return Status::success();
}

}  // namespace kv
