#include "kernels/plan-blocks/plan-blocks.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(plan_blocks, PlanBlocksArguments)
KV_CUDA_KERNEL(plan_blocks, PlanBlocksArguments)

std::string describe_plan_blocks_fault(const Fault& fault) {
  switch (static_cast<PlanBlocksFault>(fault.code)) {
    case PlanBlocksFault::list_out_of_range:
      return "the list of slot " + std::to_string(fault.value) + " is longer than its room, or names blocks that its sequence does not have";
    case PlanBlocksFault::cache_too_small:
      return "a step chooses more blocks than the cache has, which are " + std::to_string(fault.limit) + ": give it more, or smaller budgets";
    default:
      return describe_paged_fault(fault);
  }
}

static Status invalid(PlanBlocksFault code, int64_t value, int64_t limit) {
  Fault fault;
  fault.code = static_cast<int32_t>(code);
  fault.value = value;
  fault.limit = limit;
  return Status::failure(StatusCode::invalid_value, describe_plan_blocks_fault(fault));
}

// Checks the lists, and that the cache has room for what they choose of it. The batch must be valid.
static Status validate_lists(const PlanBlocksArguments& a) {
  int64_t cached = 0;
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    if (a.query_start[entry] == a.query_start[entry + 1]) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
      const int32_t count = a.chosen_counts[cache_head];
      const auto blocks = static_cast<int32_t>((int64_t{a.key_counts[cache_head]} + a.block_tokens - 1) / a.block_tokens);
      bool is_right = count >= 0 && count <= a.room;
      for (int32_t i = 0, least = 0; is_right && i < count; ++i) {
        const int32_t block = a.chosen[cache_head * a.room + i];
        is_right = block >= least && block < blocks;
        least = block + 1;
        if (is_right && a.fixed_place(cache_head, block, blocks) < 0) ++cached;
      }
      if (!is_right) return invalid(PlanBlocksFault::list_out_of_range, a.slots[entry], 0);
    }
  }
  return cached <= a.cached ? Status::success() : invalid(PlanBlocksFault::cache_too_small, cached, a.cached);
}

Status plan_blocks(const PlanBlocksArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return plan_blocks_cuda(arguments, context);
  Status status = validate_tables(arguments, false);
  if (status.ok()) status = validate_lists(arguments);
  if (!status.ok()) return status;
  plan_blocks_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
