#include "kernels/cpu-dispatch.h"
#include "kernels/cuda-dispatch.h"
#include "kernels/gather-kv/gather-kv.h"

namespace kv {
namespace {

Status check_head(const GatherKvArguments& a, int32_t head) {
  const int32_t* indices = a.indices + head * a.index_stride;
  int32_t before = -1;
  for (int32_t i = 0; i < a.counts[head]; ++i) {
    if (indices[i] <= before || indices[i] >= a.key_counts[head]) {
      return Status::failure(StatusCode::invalid_value,
                             "kv head " + std::to_string(head) + " selects token " + std::to_string(indices[i]) +
                                 " after " + std::to_string(before) + " of " + std::to_string(a.key_counts[head]) +
                                 "; indices must ascend and lie within what the slot holds");
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

KV_CPU_KERNEL(gather_kv, GatherKvArguments)
KV_CUDA_KERNEL(gather_kv, GatherKvArguments)

Status gather_kv(const GatherKvArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return gather_kv_cuda(arguments, context);
  Status status = check(arguments);
  if (status.ok()) gather_kv_cpu(arguments, context);
  return status;
}

}  // namespace kv
