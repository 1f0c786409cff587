#include "kernels/load-values/load-values.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(load_values, LoadValuesArguments)
KV_CUDA_KERNEL(load_values, LoadValuesArguments)

Status load_values(const LoadValuesArguments& arguments, ExecutionContext& context) {
  if (arguments.copies == 0) return Status::success();
  if (context.device == DeviceKind::cuda) return load_values_cuda(arguments, context);
  load_values_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
