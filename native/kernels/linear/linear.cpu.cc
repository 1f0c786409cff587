#include "kernels/linear/linear-few-rows.cpu.h"
#include "kernels/linear/linear-many-rows.cpu.h"

namespace kv {
namespace KV_ISA {

void linear(const LinearArguments& a, Workers& workers) {
  if (a.tokens == 0 || a.out_features == 0) return;
  if (are_few_rows(a)) {
    multiply_few_rows(a, workers);
  } else {
    multiply_many_rows(a, workers);
  }
}

}  // namespace KV_ISA
}  // namespace kv
