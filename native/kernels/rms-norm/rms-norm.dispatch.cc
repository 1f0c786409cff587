#include "kernels/rms-norm/rms-norm.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(rms_norm, RmsNormArguments)
KV_CUDA_KERNEL(rms_norm, RmsNormArguments)

Status rms_norm(const RmsNormArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return rms_norm_cuda(arguments, context);
  rms_norm_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
