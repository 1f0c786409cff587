#include "kernels/decode-attention-24/decode-attention-24.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(decode_attention_24, Attention24Arguments)
KV_CUDA_KERNEL(decode_attention_24, Attention24Arguments)

Status decode_attention_24(const Attention24Arguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return decode_attention_24_cuda(arguments, context);
  status = validate_tables(arguments);
  if (!status.ok()) return status;
  decode_attention_24_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
