#include "kernels/swiglu/swiglu.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(swiglu, SwigluArguments)
KV_CUDA_KERNEL(swiglu, SwigluArguments)

Status swiglu(const SwigluArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return swiglu_cuda(arguments, context);
  swiglu_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
