#include "kernels/block-scores/block-scores.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(block_scores, BlockScoresArguments)
KV_CUDA_KERNEL(block_scores, BlockScoresArguments)

Status block_scores(const BlockScoresArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok() || arguments.batch == 0 || arguments.query_tokens == 0) return status;
  if (context.device == DeviceKind::cuda) return block_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (!status.ok()) return status;
  block_scores_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
