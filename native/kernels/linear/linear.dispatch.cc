#include "kernels/cpu-dispatch.h"
#include "kernels/linear/linear.h"

namespace kv {

KV_CPU_KERNEL(linear, LinearArguments)

Status linear(const LinearArguments& arguments, ExecutionContext& context) {
  linear_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
