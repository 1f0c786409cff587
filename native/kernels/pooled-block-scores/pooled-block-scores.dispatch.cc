#include "kernels/pooled-block-scores/pooled-block-scores.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(pooled_block_scores, PooledBlockScoresArguments)
KV_CUDA_KERNEL(pooled_block_scores, PooledBlockScoresArguments)

Status pooled_block_scores(const PooledBlockScoresArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return pooled_block_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_counts(arguments);
  if (status.ok()) pooled_block_scores_cpu(arguments, context);
  return status;
}

}  // namespace kv
