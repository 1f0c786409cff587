#include "kernels/copy-blocks/copy-blocks.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(copy_blocks, CopyBlocksArguments)
KV_CUDA_KERNEL(copy_blocks, CopyBlocksArguments)

Status copy_blocks(const CopyBlocksArguments& arguments, ExecutionContext& context) {
  if (arguments.copies == 0) return Status::success();
  if (context.device == DeviceKind::cuda) return copy_blocks_cuda(arguments, context);
  copy_blocks_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
