#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(vertical_slash_block_scores, VerticalSlashBlockScoresArguments)
KV_CUDA_KERNEL(vertical_slash_block_scores, VerticalSlashBlockScoresArguments)

Status vertical_slash_block_scores(const VerticalSlashBlockScoresArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return vertical_slash_block_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_counts(arguments);
  if (status.ok()) vertical_slash_block_scores_cpu(arguments, context);
  return status;
}

}  // namespace kv
