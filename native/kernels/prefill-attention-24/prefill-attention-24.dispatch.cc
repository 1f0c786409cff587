#include "kernels/prefill-attention-24/prefill-attention-24.h"

#include "shared/attention/prefill/tiled-caches.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_TILED_CPU_KERNEL(prefill_attention_24, Attention24Arguments)
KV_CUDA_KERNEL(prefill_attention_24, Attention24Arguments)

Status prefill_attention_24(const Attention24Arguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return prefill_attention_24_cuda(arguments, context);
  status = validate_tables(arguments);
  if (!status.ok()) return status;
  prefill_attention_24_cpu(arguments, for_prefill(arguments, context));
  return Status::success();
}

}  // namespace kv
