#include "kernels/prefill-attention/prefill-attention.h"

#include "shared/attention/prefill/tiled-caches.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_TILED_CPU_KERNEL(prefill_attention, PagedAttentionArguments)
KV_CUDA_KERNEL(prefill_attention, PagedAttentionArguments)

Status prefill_attention(const PagedAttentionArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return prefill_attention_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (!status.ok()) return status;
  prefill_attention_cpu(arguments, for_prefill(arguments, context));
  return Status::success();
}

}  // namespace kv
