// Vector arithmetic for kernels that have one source for all instruction sets. A `*.cpu.cc` file is compiled once for
// each set (baseline, avx2, avx512) with the set's flags, inside a namespace of its own, KV_ISA. `Vec` is as wide as
// the set allows.
//
// Kernel sources use no standard-library templates. The linker keeps one copy of an inline function for everyone, and
// that copy must not be one that was compiled with AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

#include "runtime/dtype.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef KV_ISA
#error "compile kernel sources with -DKV_ISA=baseline|avx2|avx512"
#endif

namespace kv {
namespace KV_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
// Masked forms of intrinsics are used, because GCC 12 warns that the plain ones read an uninitialised register.
constexpr __mmask16 kAllLanes = 0xffff;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  uint32_t magnitude = bits & 0x7fffu;
  float value;
  if (magnitude >= 0x7c00u) {
    const uint32_t word = sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13);
    std::memcpy(&value, &word, 4);
    return value;
  }
  // The factor 2^112 moves the exponent of a half, subnormals too, to that of a float.
  uint32_t word = magnitude << 13;
  std::memcpy(&value, &word, 4);
  value *= 0x1p112f;
  std::memcpy(&word, &value, 4);
  word |= sign;
  std::memcpy(&value, &word, 4);
  return value;
#endif
}

// Rounds to nearest even, like all conversions here.
inline uint16_t float_to_half(float value) {
#if defined(__F16C__)
  return _cvtss_sh(value, 0);
#else
  uint32_t word;
  std::memcpy(&word, &value, 4);
  const uint32_t sign = (word >> 16) & 0x8000u;
  word &= 0x7fffffffu;
  if (word > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((word >> 13) & 0x3ffu));
  if (word >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (word < 0x38800000u) {
    // Adding 0.5 aligns the last bit of a half subnormal with the float's last bit.
    float magnitude;
    std::memcpy(&magnitude, &word, 4);
    magnitude += 0.5f;
    std::memcpy(&word, &magnitude, 4);
    return static_cast<uint16_t>(sign | (word - 0x3f000000u));
  }
  word += 0xc8000fffu + ((word >> 13) & 1u);
  return static_cast<uint16_t>(sign | (word >> 13));
#endif
}

inline float bfloat_to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline uint16_t float_to_bfloat(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((word >> 16) | 0x40u);
  word += 0x7fffu + ((word >> 16) & 1u);
  return static_cast<uint16_t>(word >> 16);
}

// Storage types as C++ types. `Half` and `Bfloat` are the raw 16 bits.
struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Half x) { return half_to_float(x.bits); }
inline float to_float(Bfloat x) { return bfloat_to_float(x.bits); }
inline float to_float(int8_t x) { return x; }
inline void from_float(float* p, float x) { *p = x; }
inline void from_float(Half* p, float x) { p->bits = float_to_half(x); }
inline void from_float(Bfloat* p, float x) { p->bits = float_to_bfloat(x); }

// Sixteen bits in each lane, with zeros above.
template <class T>
inline VecInt load_bits(const T* p) {
  typedef uint16_t Bits __attribute__((vector_size(kLanes * 2)));
  Bits bits;
  std::memcpy(&bits, p, sizeof bits);
  return __builtin_convertvector(bits, VecInt);
}

inline Vec load(const Half* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const VecInt bits = load_bits(p);
  const VecInt magnitude = (bits & 0x7fff) << 13;
  const VecInt special = magnitude >= (0x7c00 << 13);
  // The same steps as half_to_float, lane by lane.
  const VecInt finite = reinterpret_cast<VecInt>(reinterpret_cast<Vec>(magnitude) * 0x1p112f);
  const VecInt word = (finite & ~special) | ((magnitude | 0x7f800000) & special);
  return reinterpret_cast<Vec>(word | ((bits & 0x8000) << 16));
#endif
}

inline Vec load(const Bfloat* p) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAllLanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAllLanes, wide, 16));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
  return reinterpret_cast<Vec>(load_bits(p) << 16);
#endif
}

// Codes as whole numbers.
inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_maskz_cvtepi32_ps(kAllLanes, _mm512_maskz_cvtepi8_epi32(kAllLanes, codes));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, VecInt), Vec);
#endif
}

inline void store(Half* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(kAllLanes, v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) from_float(p + i, v[i]);
#endif
}

inline void store(Bfloat* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) from_float(p + i, v[i]);
}

// Calls body with a value of the C++ type that stores `dtype`, which must be one of the three float types.
template <class Body>
inline void with_float_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f16:
      return body(Half{});
    case DType::bf16:
      return body(Bfloat{});
    default:
      return body(0.0f);
  }
}

// Returns a if either is NaN: a running maximum of scores keeps its value.
inline Vec maximum(Vec a, Vec b) { return b > a ? b : a; }

// Lane i of the result is lane index[i] of a and b together, a first.
inline Vec permute(Vec a, Vec b, VecInt index) {
#if defined(__clang__)
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = index[i] < kLanes ? a[index[i]] : b[index[i] - kLanes];
  return v;
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// In each four lanes, columns become rows.
__attribute__((always_inline)) inline void transpose_quads(Vec (&rows)[4]) {
  VecInt pairs[2] = {}, halves[2] = {};
  for (int i = 0; i < kLanes; ++i) {
    const int quad = i & ~3, odd = i & 1, upper = (i & 2) / 2;
    for (int n = 0; n < 2; ++n) {
      pairs[n][i] = quad + 2 * n + upper + odd * kLanes;
      halves[n][i] = quad + 2 * n + odd + upper * kLanes;
    }
  }
  const Vec a = permute(rows[0], rows[1], pairs[0]), b = permute(rows[0], rows[1], pairs[1]);
  const Vec c = permute(rows[2], rows[3], pairs[0]), d = permute(rows[2], rows[3], pairs[1]);
  rows[0] = permute(a, c, halves[0]);
  rows[1] = permute(a, c, halves[1]);
  rows[2] = permute(b, d, halves[0]);
  rows[3] = permute(b, d, halves[1]);
}

// Adds the upper half of the lanes to the lower half until one lane is left.
template <int half = kLanes / 2>
inline float horizontal_sum(Vec v) {
  if constexpr (half == 0) {
    return v[0];
  } else {
    VecInt index = {};
    for (int i = 0; i < kLanes; ++i) index[i] = (i + half) % kLanes;
    return horizontal_sum<half / 2>(v + permute(v, v, index));
  }
}

inline float horizontal_maximum(Vec v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

// e^x for x <= 88, to about 1 ulp. 0 below -87.7, so that exponential(-infinity) is 0. NaN for NaN.
inline Vec exponential(Vec x) {
  const Vec safe = maximum(x, splat(-88.0f));
  // e^x = 2^n e^r with |r| <= ln(2)/2. The magic constant rounds to an integer, n + 127, in the low bits. Shifted up,
  // these bits are 2^n, or 0 for n = -127.
  const Vec magic = splat(12582912.0f + 127.0f);
  const Vec shifted = safe * 1.44269504088896341f + magic;
  const Vec n = shifted - magic;
  const Vec r = (safe - n * 0.693145751953125f) - n * 1.42860682030941723212e-6f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * reinterpret_cast<Vec>(reinterpret_cast<VecInt>(shifted) << 23);
}

}  // namespace KV_ISA
}  // namespace kv
