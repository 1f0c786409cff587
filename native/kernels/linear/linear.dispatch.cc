#include <algorithm>

#include "kernels/linear/linear.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_TILED_CPU_KERNEL(linear, LayersOfInput)
KV_CUDA_KERNEL(linear, std::vector<LinearArguments>)

// The layer of the rows that are wanted, which the host knows.
static LinearArguments wanted(LinearArguments layer) {
  if (layer.rows != nullptr) layer.tokens = std::clamp<int64_t>(*layer.rows, 0, layer.tokens);
  return layer;
}

// Once all cores multiply on tiles, which lowers their clock, the six products of f32 weights take longer than AVX-512
// does, and layers of few outputs longer to pack than to multiply, the more so if their weights are split.
static bool pays_on_tiles(const LinearArguments& layer) {
  return layer.weight_dtype != DType::f32 && layer.out_features >= (layer.weight_dtype == DType::bf16 ? 512 : 1024);
}

// Changes the order of the layers.
static void run_on_cpu(std::vector<LinearArguments>& layers, ExecutionContext context) {
  const auto run = [&](auto begin, auto end) {
    if (begin != end) linear_cpu({&*begin, end - begin}, context);
  };
  if (context.isa != Isa::amx || are_few_rows(layers[0])) return run(layers.begin(), layers.end());
  const auto others = std::stable_partition(layers.begin(), layers.end(), pays_on_tiles);
  run(layers.begin(), others);
  context.isa = Isa::avx512;
  run(others, layers.end());
}

Status linear(const std::vector<LinearArguments>& layers, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return linear_cuda(layers, context);
  std::vector<LinearArguments> all;
  for (const LinearArguments& layer : layers) all.push_back(wanted(layer));
  run_on_cpu(all, context);
  if (!is_gated(layers)) return Status::success();
  return swiglu(swiglu_of(wanted(layers[0]), layers[1]), context);
}

}  // namespace kv
