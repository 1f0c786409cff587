// Numbers as exact sums of bf16 numbers, for products that take bf16 factors alone. bf16 has 8 significant bits, so
// f32 (24) has three parts, f16 (11) two, and bf16 one.
#pragma once

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

constexpr int kMostParts = 3;

template <class T>
constexpr int kParts = kMostParts;
template <>
constexpr int kParts<Half> = 2;
template <>
constexpr int kParts<Bfloat> = 1;

// The product of part i of one factor and part j of the other counts if i + j < kMostParts. Each part is at most 2^-8
// of the one before, so those left out are together at most (2 + 2^-8) 2^-24 of the product.

// part[0] + part[1] + ... = x, where the upper 16 bits of each part are its bf16. Parts of a finite number are exact
// as long as they are no subnormal numbers. One part of a NaN is NaN.
template <int parts>
inline void split(Vec x, Vec* part) {
  for (int i = 0; i + 1 < parts; ++i) {
    const VecInt rounded = (reinterpret_cast<VecInt>(x) + 0x8000) & static_cast<int32_t>(0xffff0000u);
    part[i] = reinterpret_cast<Vec>(rounded);
    x -= part[i];
  }
  part[parts - 1] = x;
}

// Pairs of bf16: the upper halves of `even`, and in front of them those of `odd`.
inline VecInt upper_halves(Vec even, Vec odd) {
  return (reinterpret_cast<VecInt>(even) >> 16 & 0xffff) | (reinterpret_cast<VecInt>(odd) & static_cast<int32_t>(0xffff0000u));
}

// A row is multiplied by 2^n, n its scale, before it is split, which brings its largest number near 2^47. Then no part
// and no product of parts is subnormal, which tiles would take for zero, unless it is 2^-150 of the largest; and no sum
// of products overflows. The limits of n keep 2^n, and 2^-n of two rows, within f32.
constexpr int kScaledExponent = 47, kLowestScale = -80, kHighestScale = 126;

inline int32_t scale_of(float largest) {
  uint32_t word;
  std::memcpy(&word, &largest, sizeof word);
  const int32_t scale = kScaledExponent + 127 - static_cast<int32_t>(word >> 23);
  return scale < kLowestScale ? kLowestScale : scale > kHighestScale ? kHighestScale : scale;
}

// 2^n for n from -126 to 127
inline Vec power_of_two(VecInt n) { return reinterpret_cast<Vec>((n + 127) << 23); }

// v * 2^-n for n up to 252, in two steps for the sake of n beyond f32's exponents.
inline Vec unscale(Vec v, VecInt n) {
  const VecInt half = -n >> 1;
  return v * power_of_two(half) * power_of_two(-n - half);
}

}  // namespace KV_ISA
}  // namespace kv
