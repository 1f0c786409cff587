#include "kernels/mixed-decode-attention/mixed-decode-attention.h"

#include "kernels/cpu-dispatch.h"
#include "kernels/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(mixed_decode_attention, MixedAttentionArguments)
KV_CUDA_KERNEL(mixed_decode_attention, MixedAttentionArguments)

Status mixed_decode_attention(const MixedAttentionArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return mixed_decode_attention_cuda(arguments, context);
  status = validate_tables(arguments);
  if (!status.ok()) return status;
  mixed_decode_attention_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
