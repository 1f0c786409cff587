#include "kernels/running-means/running-means.h"

#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class T>
void add_block(const RunningMeansArguments& a, int32_t i) {
  const T* values = static_cast<const T*>(a.values) + a.from[i] * a.block_stride;
  float* sums = a.sums + int64_t{a.to[i]} * a.head_dim;
  const float* before = a.sums + int64_t{a.before[i]} * a.head_dim;
  T* means = static_cast<T*>(a.means) + int64_t{a.to[i]} * a.head_dim;
  const float tokens = static_cast<float>(kSummedBlockTokens) * static_cast<float>(a.counts[i]);
  for (int32_t dim = 0; dim < a.head_dim; ++dim) sums[dim] = a.before[i] < 0 ? 0.0f : before[dim];
  for (int32_t token = 0; token < kSummedBlockTokens; ++token) {
    const T* row = values + token * a.token_stride;
    for (int32_t dim = 0; dim < a.head_dim; ++dim) sums[dim] += to_float(row[dim]);
  }
  for (int32_t dim = 0; dim < a.head_dim; ++dim) from_float(means + dim, sums[dim] / tokens);
}

}  // namespace

void running_means(const RunningMeansArguments& a, Workers& workers) {
  // A task is all blocks that go on from its first one.
  workers.for_each(static_cast<size_t>(a.length), [&](size_t task, int) {
    const auto first = static_cast<int32_t>(task);
    if (a.goes_on(first)) return;
    with_float_type(a.dtype, [&](auto element) {
      add_block<decltype(element)>(a, first);
      for (int32_t i = first + 1; i < a.length && a.goes_on(i); ++i) add_block<decltype(element)>(a, i);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
