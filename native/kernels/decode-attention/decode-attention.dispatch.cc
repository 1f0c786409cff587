#include "kernels/decode-attention/decode-attention.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(decode_attention, PagedAttentionArguments)
KV_CUDA_KERNEL(decode_attention, PagedAttentionArguments)

Status decode_attention(const PagedAttentionArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return decode_attention_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (!status.ok()) return status;
  decode_attention_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
