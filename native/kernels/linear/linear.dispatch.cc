#include "kernels/cpu-dispatch.h"
#include "kernels/cuda-dispatch.h"
#include "kernels/linear/linear.h"

namespace kv {

KV_CPU_KERNEL(linear, LinearArguments)
KV_CUDA_KERNEL(linear, LinearArguments)

Status linear(const LinearArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return linear_cuda(arguments, context);
  linear_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
