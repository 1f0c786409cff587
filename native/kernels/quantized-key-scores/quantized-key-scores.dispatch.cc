#include "kernels/quantized-key-scores/quantized-key-scores.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"
#include "shared/quantized-blocks/quantized-blocks.h"

namespace kv {

KV_CPU_KERNEL(quantized_key_scores, QuantizedKeyScoresArguments)
KV_CUDA_KERNEL(quantized_key_scores, QuantizedKeyScoresArguments)

Status quantized_key_scores(const QuantizedKeyScoresArguments& given, ExecutionContext& context) {
  QuantizedKeyScoresArguments arguments = given;
  arguments.block_tokens = kQuantizedBlockTokens;
  arguments.cache_dtype = arguments.query_dtype;
  Status status = validate_sizes(arguments);
  if (status.ok()) status = validate_quantized_format(arguments.head_dim, arguments.key_bits);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return quantized_key_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_whole_blocks(arguments);
  if (!status.ok()) return status;
  quantized_key_scores_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
