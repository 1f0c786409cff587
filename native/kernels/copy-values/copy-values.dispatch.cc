#include "kernels/copy-values/copy-values.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(copy_values, CopyValuesArguments)
KV_CUDA_KERNEL(copy_values, CopyValuesArguments)

Status copy_values(const CopyValuesArguments& arguments, ExecutionContext& context) {
  if (arguments.copies == 0) return Status::success();
  if (context.device == DeviceKind::cuda) return copy_values_cuda(arguments, context);
  copy_values_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
