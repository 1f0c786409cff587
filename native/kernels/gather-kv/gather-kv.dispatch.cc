#include <algorithm>
#include <string>
#include <utility>

#include "kernels/gather-kv/gather-kv.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {
namespace {

bool names_block(const GatherKvArguments& a, int32_t head, int32_t token) {
  const int32_t block = a.block_table[int64_t{head} * a.table_width + token / a.block_tokens];
  return block >= 0 && block < a.block_count;
}

Status check_head(const GatherKvArguments& a, int32_t head) {
  const int32_t* indices = a.indices + head * a.index_stride;
  const int64_t held = std::min<int64_t>(a.key_counts[head], int64_t{a.table_width} * a.block_tokens);
  const std::string name = "kv head " + std::to_string(head);
  int32_t before = -1;
  for (int32_t i = 0; i < a.counts[head]; ++i) {
    if (indices[i] <= before || indices[i] >= held) {
      return invalid(name + " selects token " + std::to_string(indices[i]) + " after " + std::to_string(before) + " of " +
                     std::to_string(held) + "; indices must ascend and lie within what the slot holds");
    }
    if (!names_block(a, head, i) || !names_block(a, head, indices[i])) {
      return invalid(name + " selects token " + std::to_string(indices[i]) +
                     ", but the block table leads outside the pool: give the slot its blocks first");
    }
    before = indices[i];
  }
  return Status::success();
}

Status check(const GatherKvArguments& a) {
  for (int32_t head = 0; head < a.kv_heads; ++head) {
    const Status status = check_head(a, head);
    if (a.outcomes != nullptr) {
      a.outcomes[head] = status.ok() ? 0 : 1;
    } else if (!status.ok()) {
      return status;
    }
  }
  return Status::success();
}

}  // namespace

std::string describe_gather_kv_fault(const Fault& fault) {
  if (fault.code != static_cast<int32_t>(GatherKvFault::selection_not_ascending)) return describe_paged_fault(fault);
  return "the selection of kv head " + std::to_string(fault.value) + " does not ascend within what the slot holds";
}

KV_CPU_KERNEL(gather_kv, GatherKvArguments)
KV_CUDA_KERNEL(gather_kv, GatherKvArguments)

Status gather_kv(const GatherKvArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return gather_kv_cuda(arguments, context);
  Status status = check(arguments);
  if (status.ok()) gather_kv_cpu(arguments, context);
  return status;
}

}  // namespace kv
