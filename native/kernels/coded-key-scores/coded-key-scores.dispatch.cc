#include "kernels/coded-key-scores/coded-key-scores.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(coded_key_scores, CodedKeyScoresArguments)
KV_CUDA_KERNEL(coded_key_scores, CodedKeyScoresArguments)

Status coded_key_scores(const CodedKeyScoresArguments& given, ExecutionContext& context) {
  CodedKeyScoresArguments arguments = given;
  arguments.block_tokens = kCodedBlockTokens;
  arguments.cache_dtype = arguments.query_dtype;
  Status status = validate_sizes(arguments);
  if (status.ok()) status = validate_coded_keys(arguments.coded);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return coded_key_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_whole_blocks(arguments);
  if (!status.ok()) return status;
  coded_key_scores_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
