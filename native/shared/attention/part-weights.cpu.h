// What attention over some keys, and attention over others, count in attention over all.
#pragma once

namespace kv {
namespace KV_ISA {

struct PartWeights {
  float own;
  float other;
  float log_sum_exp;
};

// Of parts with these logarithms of their softmaxes' denominators. The other part has seen a key.
inline PartWeights part_weights(float own, float other) {
  // Comparisons with NaN are false. A maximum of plus infinity makes NaN of the weights, as softmax does.
  const float most = own == own && !(own > other) ? other : own;
  const float own_part = __builtin_expf(own - most);
  const float other_part = __builtin_expf(other - most);
  const float sum = own_part + other_part;
  return {own_part / sum, other_part / sum, most + __builtin_logf(sum)};
}

}  // namespace KV_ISA
}  // namespace kv
