// Where the two dims of a pair lie in a head, and how they turn. Device code.
#pragma once

#include "kernels/rope/rope.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

__device__ inline int64_t first_of(const RopeArguments& a, int64_t pair) {
  return a.convention == RopeConvention::interleaved ? 2 * pair : pair;
}
__device__ inline int64_t second_of(const RopeArguments& a, int64_t pair) {
  return a.convention == RopeConvention::interleaved ? 2 * pair + 1 : pair + a.pairs;
}

struct Turn {
  float cosine;
  float sine;
};

// The angle is computed in f64: far positions give angles that f32 cannot hold.
__device__ inline Turn turn_by(int32_t position, float inverse_frequency, float attention_scale) {
  double sine;
  double cosine;
  sincos(static_cast<double>(position) * static_cast<double>(inverse_frequency), &sine, &cosine);
  return {static_cast<float>(cosine) * attention_scale, static_cast<float>(sine) * attention_scale};
}

__device__ inline Turn turn_of(const RopeArguments& a, int64_t token, int64_t pair) {
  return turn_by(a.positions[token], a.inverse_frequencies[pair], a.attention_scale);
}

template <class T>
struct Pair {
  T first;
  T second;
};

template <class T>
__device__ Pair<T> turned(const Pair<T>& pair, const Turn& turn) {
  const float first = to_float(pair.first);
  const float second = to_float(pair.second);
  return {from_float<T>(first * turn.cosine - second * turn.sine), from_float<T>(second * turn.cosine + first * turn.sine)};
}

}  // namespace kv
