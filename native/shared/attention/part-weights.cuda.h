// What attention over some keys, and attention over others, count in attention over all. Device code.
#pragma once

#include <cmath>

namespace kv {

struct PartWeights {
  float own;
  float other;
  float log_sum_exp;
};

// Of parts with these logarithms of their softmaxes' denominators. The other part has seen a key.
__device__ inline PartWeights part_weights(float own, float other) {
  // Comparisons with NaN are false. A maximum of plus infinity makes NaN of the weights, as softmax does.
  const float most = own == own && !(own > other) ? other : own;
  const float own_part = expf(own - most);
  const float other_part = expf(other - most);
  const float sum = own_part + other_part;
  return {own_part / sum, other_part / sum, most + logf(sum)};
}

}  // namespace kv
