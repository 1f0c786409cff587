#include "kernels/decode-attention-quantized/decode-attention-quantized.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"
#include "shared/quantized-blocks/quantized-blocks.h"

namespace kv {

KV_CPU_KERNEL(decode_attention_quantized, QuantizedAttentionArguments)
KV_CUDA_KERNEL(decode_attention_quantized, QuantizedAttentionArguments)

Status decode_attention_quantized(const QuantizedAttentionArguments& given, ExecutionContext& context) {
  QuantizedAttentionArguments arguments = given;
  arguments.causal = false;
  arguments.block_tokens = kQuantizedBlockTokens;
  arguments.cache_dtype = arguments.query_dtype;
  Status status = validate_sizes(arguments);
  if (status.ok()) status = validate_quantized_format(arguments.head_dim, arguments.key_bits);
  if (status.ok()) status = validate_quantized_format(arguments.head_dim, arguments.value_bits);
  if (status.ok() && (arguments.key_bits < 4 || arguments.value_bits < 4)) {
    status = Status::failure(StatusCode::capability, "attention reads codes of 8 or 4 bits");
  }
  if (status.ok() && arguments.merge && arguments.log_sum_exp == nullptr) {
    status = Status::failure(StatusCode::invalid_value, "attention over other keys can only be merged with its log-sum-exp");
  }
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return decode_attention_quantized_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_whole_blocks(arguments);
  if (!status.ok()) return status;
  decode_attention_quantized_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
