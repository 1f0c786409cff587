#include "kernels/linear/linear-few-rows.cpu.h"
#include "kernels/linear/linear-many-rows.cpu.h"
#if defined(KV_TILES)
#include "kernels/linear/linear-tiles.cpu.h"
#endif

namespace kv {
namespace KV_ISA {

void linear(const LinearArguments& a, Workers& workers) {
  if (a.tokens == 0 || a.out_features == 0) return;
  if (are_few_rows(a)) return multiply_few_rows(a, workers);
#if defined(KV_TILES)
  if (fills_tiles(a)) return multiply_on_tiles(a, workers);
#endif
  multiply_many_rows(a, workers);
}

}  // namespace KV_ISA
}  // namespace kv
