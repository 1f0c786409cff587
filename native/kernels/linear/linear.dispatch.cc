#include <algorithm>

#include "kernels/linear/linear.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(linear, LinearArguments)
KV_CUDA_KERNEL(linear, std::vector<LinearArguments>)

Status linear(const std::vector<LinearArguments>& layers, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return linear_cuda(layers, context);
  for (LinearArguments layer : layers) {
    if (layer.rows != nullptr) layer.tokens = std::clamp<int64_t>(*layer.rows, 0, layer.tokens);
    linear_cpu(layer, context);
  }
  return Status::success();
}

}  // namespace kv
