#include <algorithm>

#include "kernels/linear/linear.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_TILED_CPU_KERNEL(linear, LinearArguments)
KV_CUDA_KERNEL(linear, std::vector<LinearArguments>)

// The layer of the rows that are wanted, which the host knows.
static LinearArguments wanted(LinearArguments layer) {
  if (layer.rows != nullptr) layer.tokens = std::clamp<int64_t>(*layer.rows, 0, layer.tokens);
  return layer;
}

Status linear(const std::vector<LinearArguments>& layers, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return linear_cuda(layers, context);
  for (const LinearArguments& layer : layers) linear_cpu(wanted(layer), context);
  if (!is_gated(layers)) return Status::success();
  return swiglu(swiglu_of(wanted(layers[0]), layers[1]), context);
}

}  // namespace kv
