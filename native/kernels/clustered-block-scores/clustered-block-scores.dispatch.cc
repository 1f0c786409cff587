#include "kernels/clustered-block-scores/clustered-block-scores.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(clustered_block_scores, ClusteredBlockScoresArguments)
KV_CUDA_KERNEL(clustered_block_scores, ClusteredBlockScoresArguments)

Status clustered_block_scores(const ClusteredBlockScoresArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return clustered_block_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_counts(arguments);
  if (status.ok()) clustered_block_scores_cpu(arguments, context);
  return status;
}

}  // namespace kv
