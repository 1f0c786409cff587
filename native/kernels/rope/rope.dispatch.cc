#include "kernels/rope/rope.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(rope, RopeArguments)
KV_CUDA_KERNEL(rope, RopeArguments)

Status rope(const RopeArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return rope_cuda(arguments, context);
  rope_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
