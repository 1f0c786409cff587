// Codes of quantized blocks as f32 numbers, what is stored over the step of its group: neighbouring dims of a token for
// values, neighbouring tokens of a dim for keys.
#pragma once

#include "shared/quantized-blocks/quantized-blocks.cpu.h"
#include "shared/quantized-blocks/quantized-rows.cpu.h"

namespace kv {
namespace KV_ISA {

// The code in the lowest four bits of each lane.
inline Vec numbers_of_nibbles(VecInt bits) {
#if defined(__AVX512F__)
  constexpr Vec kNumbers = {-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f,
                            0.5f,  1.5f,  2.5f,  3.5f,  4.5f,  5.5f,  6.5f,  7.5f};
  return _mm512_maskz_permutexvar_ps(kAllLanes, reinterpret_cast<__m512i>(bits), kNumbers);
#else
  return __builtin_convertvector(bits & 15, Vec) - middle_code(4);
#endif
}

// The code of each lane at a place of a word, the lowest first.
template <int kBits>
Vec numbers_at(VecInt words, int place) {
  if constexpr (kBits == 4) return numbers_of_nibbles(words >> 4 * place);
  return __builtin_convertvector(words << (24 - 8 * place) >> 24, Vec);
}

// The dims of a group, less `first`, that a vector of half of them has: those from `first` and from `first` + 16 on.
struct HalfVectors {
  Vec low;
  Vec high;
};

template <int kBits>
HalfVectors load_halves(const uint8_t* group, int first) {
  if constexpr (kBits == 4) {
    const VecInt both = load_bytes(group + first);
    return {numbers_of_nibbles(both), numbers_of_nibbles(both >> 4)};
  }
  return {__builtin_convertvector(load_signed_bytes(group + first), Vec),
          __builtin_convertvector(load_signed_bytes(group + 16 + first), Vec)};
}

// The words of 16 bytes of kLanes tokens. A lane is a token.
struct TokenWords {
  VecInt of[4];

  TokenWords(const uint8_t* bytes, int64_t stride) {
    Vec rows[4];  // each has the bytes of every fourth token
    for (int i = 0; i < 4; ++i) rows[i] = load_every_fourth(bytes + i * stride, 4 * stride);
    transpose_quads(rows);
    for (int i = 0; i < 4; ++i) of[i] = reinterpret_cast<VecInt>(rows[i]);
  }

 private:
  static Vec load_every_fourth(const uint8_t* bytes, int64_t stride) {
#if defined(__AVX512F__) || defined(__AVX2__)
    const auto row = [&](int i) { return _mm_loadu_ps(reinterpret_cast<const float*>(bytes + i * stride)); };
    const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(row(0)), row(1), 1);
#if defined(__AVX512F__)
    const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(row(2)), row(3), 1);
    return _mm512_maskz_insertf32x8(kAllLanes, _mm512_castps256_ps512(low), high, 1);
#else
    return low;
#endif
#else
    float row[kLanes];
    for (int i = 0; i < kLanes / 4; ++i) std::memcpy(row + 4 * i, bytes + i * stride, 16);
    return load(row);
#endif
  }
};

// Of kLanes tokens, the scales of up to four groups from `first` on, one byte each. `scales` are [token][group].
inline VecInt scale_words(const uint8_t* scales, int groups, int first) {
  VecInt words = {};
  if (groups == 4) {
    std::memcpy(&words, scales, sizeof words);
  } else if (groups == 2) {
    words = load_bits(reinterpret_cast<const Half*>(scales));
  } else {
    const int bytes = groups - first < 4 ? groups - first : 4;
    for (int lane = 0; lane < kLanes; ++lane) {
      int32_t word = 0;
      std::memcpy(&word, scales + lane * groups + first, static_cast<size_t>(bytes));
      words[lane] = word;
    }
  }
  return words;
}

// The scale in byte `place` of each word. The exponent and the fraction move to the places of an f32 number's; the factor
// moves the exponent, that of numbers without a leading one too.
inline Vec scale_numbers(VecInt words, int place) {
  const VecInt bytes = words >> 8 * place & 0xff;
  const Vec numbers = reinterpret_cast<Vec>(bytes << 20) * 0x1p108f;
  const VecInt nan = bytes == kNanScale;
  return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(numbers) | (nan & 0x7fc00000));
}

}  // namespace KV_ISA
}  // namespace kv
