#include "kernels/merge-attention/merge-attention.h"

#include "shared/attention/part-weights.cpu.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class T, class Other>
void merge_row(T* output, const Other* other, int64_t dims, PartWeights weights) {
  int64_t dim = 0;
  for (; dim + kLanes <= dims; dim += kLanes) {
    store(output + dim, load(output + dim) * weights.own + load(other + dim) * weights.other);
  }
  for (; dim < dims; ++dim) from_float(output + dim, to_float(output[dim]) * weights.own + to_float(other[dim]) * weights.other);
}

template <class T, class Other>
void merge_rows(const MergeAttentionArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.tokens), [&](size_t index, int) {
    const int64_t token = static_cast<int64_t>(index);
    for (int64_t head = 0; head < a.query_heads; ++head) {
      float& own = a.log_sum_exp[token * a.query_heads + head];
      const float other = a.other_log_sum_exp[token * a.query_heads + head];
      if (other == -__builtin_inff()) continue;
      const PartWeights weights = part_weights(own, other);
      merge_row(static_cast<T*>(a.output) + token * a.output_token_stride + head * a.output_head_stride,
                static_cast<const Other*>(a.other) + token * a.other_token_stride + head * a.other_head_stride, a.head_dim,
                weights);
      own = weights.log_sum_exp;
    }
  });
}

}  // namespace

void merge_attention(const MergeAttentionArguments& a, Workers& workers) {
  with_float_type(a.dtype, [&](auto element) {
    with_float_type(a.other_dtype, [&](auto other) { merge_rows<decltype(element), decltype(other)>(a, workers); });
  });
}

}  // namespace KV_ISA
}  // namespace kv
