#include "kernels/select-top-blocks/select-top-blocks.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(select_top_blocks, SelectTopBlocksArguments)
KV_CUDA_KERNEL(select_top_blocks, SelectTopBlocksArguments)

Status select_top_blocks(const SelectTopBlocksArguments& arguments, ExecutionContext& context) {
  if (arguments.batch == 0) return Status::success();
  if (context.device == DeviceKind::cuda) return select_top_blocks_cuda(arguments, context);
  Status status = validate_rows(arguments);
  if (status.ok()) status = validate_counts(arguments);
  if (!status.ok()) return status;
  select_top_blocks_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
