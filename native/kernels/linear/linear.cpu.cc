#if defined(KV_TILES)
#include "kernels/linear/linear-tiles.cpu.h"
#else
#include "kernels/linear/linear-few-rows.cpu.h"
#include "kernels/linear/linear-many-rows.cpu.h"
#endif

namespace kv {
#if defined(KV_TILES)
namespace avx512 {
void linear(const LayersOfInput&, Workers&);
}
#endif
namespace KV_ISA {

void linear(const LayersOfInput& layers, Workers& workers) {
  const LinearArguments& a = *layers.first;
  if (a.tokens == 0) return;
#if defined(KV_TILES)
  return are_few_rows(a) || !fills_tiles(a) ? avx512::linear(layers, workers) : multiply_on_tiles(layers, workers);
#else
  if (are_few_rows(a)) return multiply_few_rows(layers, workers);
  for (const LinearArguments& layer : layers) {
    if (layer.out_features > 0) multiply_many_rows(layer, workers);
  }
#endif
}

}  // namespace KV_ISA
}  // namespace kv
