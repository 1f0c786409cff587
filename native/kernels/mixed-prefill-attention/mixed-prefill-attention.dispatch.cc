#include "kernels/mixed-prefill-attention/mixed-prefill-attention.h"

#include "kernels/cpu-dispatch.h"

namespace kv {

KV_CPU_KERNEL(mixed_prefill_attention, MixedAttentionArguments)

Status mixed_prefill_attention(const MixedAttentionArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) {
    return Status::failure(StatusCode::capability, "there is no CUDA kernel for it yet; use the CPU");
  }
  status = validate_tables(arguments);
  if (!status.ok()) return status;
  mixed_prefill_attention_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
