#if defined(KV_TILES)
#include "kernels/linear/linear-tiles.cpu.h"
#else
#include "kernels/linear/linear-few-rows.cpu.h"
#include "kernels/linear/linear-many-rows.cpu.h"
#endif

namespace kv {
#if defined(KV_TILES)
namespace avx512 {
void linear(const LinearArguments&, Workers&);
}
#endif
namespace KV_ISA {

void linear(const LinearArguments& a, Workers& workers) {
  if (a.tokens == 0 || a.out_features == 0) return;
#if defined(KV_TILES)
  return are_few_rows(a) || !fills_tiles(a) ? avx512::linear(a, workers) : multiply_on_tiles(a, workers);
#else
  return are_few_rows(a) ? multiply_few_rows(a, workers) : multiply_many_rows(a, workers);
#endif
}

}  // namespace KV_ISA
}  // namespace kv
