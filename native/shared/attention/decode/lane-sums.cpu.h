// Sums over the lanes of several vectors at once.
#pragma once

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

typedef float Quad __attribute__((vector_size(16)));

// Lane i of the result is lane pick(i) of a and b together, a first.
template <class Pick>
inline Vec shuffle(Vec a, Vec b, Pick pick) {
  VecInt lanes = {};
  for (int i = 0; i < kLanes; ++i) lanes[i] = pick(i);
  return __builtin_shuffle(a, b, lanes);
}

// The result in each four lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3.
__attribute__((always_inline)) inline Vec add_halves(Vec a, Vec b) {
  return shuffle(a, b, [](int i) { return (i & ~3) + (i & 3) / 2 + (i & 1) * kLanes; }) +
         shuffle(a, b, [](int i) { return (i & ~3) + 2 + (i & 3) / 2 + (i & 1) * kLanes; });
}

// The result in each four lanes: the sums of a's four, of b's, of c's and of d's.
__attribute__((always_inline)) inline Vec sum_quads(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add_halves(a, b);
  const Vec cd = add_halves(c, d);
  return shuffle(ab, cd, [](int i) { return (i & ~3) + (i & 1) + (i & 2) / 2 * kLanes; }) +
         shuffle(ab, cd, [](int i) { return (i & ~3) + 2 + (i & 1) + (i & 2) / 2 * kLanes; });
}

// The sums over the lanes of a, b, c and d.
__attribute__((always_inline)) inline Quad horizontal_sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec quads = sum_quads(a, b, c, d);
  Quad parts[kLanes / 4];
  std::memcpy(parts, &quads, sizeof parts);
  Quad total = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) total += parts[i];
  return total;
}

}  // namespace KV_ISA
}  // namespace kv
