// Cosines and sines of positions and lags, in f64: far positions give angles that f32 cannot hold.
#pragma once

#include "kernels/decompose-attention/decompose-attention-interior.h"
#include "kernels/decompose-attention/decompose-attention-products.cpu.h"

namespace kv {
namespace KV_ISA {

// Positions that share a base. The angle of any position is that of its base plus one of 64 angles.
constexpr int32_t kTurnTokens = 64;

struct Turns {
  const DecomposeAttentionArguments& a;
  double* cosines;  // [kTurnTokens, pair]
  double* sines;
  double* cosines_of_pair;  // [pair, kTurnTokens]: the same
  double* sines_of_pair;

  static size_t doubles(const DecomposeAttentionArguments& a) { return size_t{4} * kTurnTokens * static_cast<size_t>(a.pairs); }

  Turns(const DecomposeAttentionArguments& arguments, double* memory)
      : a(arguments),
        cosines(memory),
        sines(cosines + kTurnTokens * a.pairs),
        cosines_of_pair(sines + kTurnTokens * a.pairs),
        sines_of_pair(cosines_of_pair + kTurnTokens * a.pairs) {
    for (int32_t token = 0; token < kTurnTokens; ++token) {
      turn(token, cosines + token * a.pairs, sines + token * a.pairs);
      for (int32_t pair = 0; pair < a.pairs; ++pair) {
        cosines_of_pair[pair * kTurnTokens + token] = cosines[token * a.pairs + pair];
        sines_of_pair[pair * kTurnTokens + token] = sines[token * a.pairs + pair];
      }
    }
  }

  void turn(int32_t position, double* cosine, double* sine) const {
    for (int32_t pair = 0; pair < a.pairs; ++pair) {
      const double angle = static_cast<double>(a.inverse_frequencies[pair]) * position;
      cosine[pair] = __builtin_cos(angle);
      sine[pair] = __builtin_sin(angle);
    }
  }

  // Writes keys as they were before their rotation (line 2), for up to kTurnTokens keys, the first of which is at
  // `position`.
  void undo(int32_t position, int32_t count, const float* keys, int64_t stride, double* base, float* plain) const {
    turn(position, base, base + a.pairs);
    const double shrink = 1.0 / static_cast<double>(a.attention_scale);
    for (int32_t token = 0; token < count; ++token) {
      const float* key = keys + token * stride;
      float* to = plain + token * stride;
      std::memcpy(to, key, static_cast<size_t>(stride) * sizeof(float));
      for (int32_t pair = 0; pair < a.pairs; ++pair) {
        const double within_cosine = cosines[token * a.pairs + pair];
        const double within_sine = sines[token * a.pairs + pair];
        const double cosine = (base[pair] * within_cosine - base[a.pairs + pair] * within_sine) * shrink;
        const double sine = (base[a.pairs + pair] * within_cosine + base[pair] * within_sine) * shrink;
        const int32_t first = first_of_pair(a, pair);
        const int32_t second = second_of_pair(a, pair);
        to[first] = static_cast<float>(key[first] * cosine + key[second] * sine);
        to[second] = static_cast<float>(key[second] * cosine - key[first] * sine);
      }
    }
  }

  // slash[lag] = r(lag) alpha - middle, for up to kTurnTokens lags. `base` has what `turn` writes of the first lag: the
  // cosines of all pairs, then the sines.
  void slash(const double* base, int32_t count, const double* alpha, double middle, float* to) const {
    constexpr int32_t kVectors = 4;
    double values[kTurnTokens];
    for (int32_t within = 0; within < kTurnTokens; within += kVectors * kLanes) {
      VecDouble sums[kVectors] = {};
      for (int32_t pair = 0; pair < a.pairs; ++pair) {
        const double of_cosine = alpha[pair] * base[pair] - alpha[a.pairs + pair] * base[a.pairs + pair];
        const double of_sine = alpha[pair] * base[a.pairs + pair] + alpha[a.pairs + pair] * base[pair];
        const int64_t first = pair * kTurnTokens + within;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[v] += of_cosine * load(cosines_of_pair + first + v * kLanes) - of_sine * load(sines_of_pair + first + v * kLanes);
        }
      }
      for (int v = 0; v < kVectors; ++v) store(values + within + v * kLanes, sums[v]);
    }
    for (int32_t within = 0; within < count; ++within) to[within] = static_cast<float>(values[within] - middle);
  }
};

// r(lag): the cosines of the pairs, then the sines.
inline void relative_angles(const DecomposeAttentionArguments& a, int32_t lag, double* to) {
  for (int32_t pair = 0; pair < a.pairs; ++pair) {
    const double angle = -static_cast<double>(a.inverse_frequencies[pair]) * lag;
    to[pair] = __builtin_cos(angle);
    to[a.pairs + pair] = __builtin_sin(angle);
  }
}

// Subtracts the mean of r over the interior of `row`, in closed form (line 9).
inline void take_mean_angles(const DecomposeAttentionArguments& a, const Interior& interior, int32_t row, double* from) {
  const int32_t nearest = interior.diagonal;
  const int32_t farthest = row - interior.sinks;
  const double count = interior.count(row);
  for (int32_t pair = 0; pair < a.pairs; ++pair) {
    const double half = static_cast<double>(a.inverse_frequencies[pair]) / 2;
    const double divisor = __builtin_sin(half);
    const double size = divisor == 0 ? 1 : __builtin_sin(count * half) / (count * divisor);
    const double angle = -(static_cast<double>(nearest) + farthest) * half;
    from[pair] -= size * __builtin_cos(angle);
    from[a.pairs + pair] -= size * __builtin_sin(angle);
  }
}

}  // namespace KV_ISA
}  // namespace kv
