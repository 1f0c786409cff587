#include "kernels/antidiagonal-block-scores/antidiagonal-block-scores.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(antidiagonal_block_scores, AntidiagonalBlockScoresArguments)
KV_CUDA_KERNEL(antidiagonal_block_scores, AntidiagonalBlockScoresArguments)

Status antidiagonal_block_scores(const AntidiagonalBlockScoresArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (arguments.stride != 8 && arguments.stride != 16) {
    return Status::failure(StatusCode::invalid_value, "the stride is " + std::to_string(arguments.stride) + "; give 8 or 16");
  }
  if (context.device == DeviceKind::cuda) return antidiagonal_block_scores_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_counts(arguments);
  if (status.ok()) antidiagonal_block_scores_cpu(arguments, context);
  return status;
}

}  // namespace kv
