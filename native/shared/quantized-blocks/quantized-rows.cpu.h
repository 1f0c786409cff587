// Blocks of codes as rows of numbers, for CPU kernels that multiply by them.
#pragma once

#include "shared/cpu/simd.cpu.h"
#include "shared/quantized-blocks/quantized-blocks.h"

namespace kv {
namespace KV_ISA {

template <int kBits>
struct CodeBits {
  static constexpr int count = kBits;
};

// Calls body with the number of bits, which must be one that there are codes of, as a type.
template <class Body>
auto with_code_bits(int bits, Body&& body) {
  switch (bits) {
    case 8:
      return body(CodeBits<8>{});
    case 4:
      return body(CodeBits<4>{});
    case 3:
      return body(CodeBits<3>{});
    default:
      return body(CodeBits<2>{});
  }
}

// Bytes in each lane. Left to the compiler, each would be converted by itself.
inline VecInt load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecInt>(
      _mm512_maskz_cvtepu8_epi32(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<VecInt>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return VecInt{p[0], p[1], p[2], p[3]};
#endif
}

// The same of signed bytes.
inline VecInt load_signed_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecInt>(
      _mm512_maskz_cvtepi8_epi32(kAllLanes, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<VecInt>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return load_bytes(p) << 24 >> 24;
#endif
}

// The upper bits of codes of 3 bits, of a pair's dims from `dim` on: bit 0 of each lane.
inline VecInt load_upper_bits(const uint8_t* pair, int dim) {
  const int bit = dim / 16;
  if constexpr (kLanes == 16) {
    uint8_t twice[16];
    std::memcpy(twice, pair, 8);
    std::memcpy(twice + 8, pair, 8);
    VecInt half = {};
    for (int i = 8; i < kLanes; ++i) half[i] = 4;
    return load_bytes(twice) >> half >> bit & 1;
  } else {
    return load_bytes(pair + dim % 8) >> (dim / 8 % 2 * 4 + bit) & 1;
  }
}

// The codes of one token; `upper` of 3 bits only.
struct CodeRow {
  const uint8_t* codes;
  const uint8_t* upper;
};

// Codes as numbers: what is stored over the step of their group. `dim` is a multiple of kLanes.
template <int kBits>
Vec load_codes(CodeRow row, int dim) {
  if constexpr (kBits == 8) {
    return __builtin_convertvector(load_signed_bytes(row.codes + dim), Vec);
  } else if constexpr (kBits == 4) {
    const VecInt both = load_bytes(row.codes + dim / 32 * 16 + dim % 16);
    return __builtin_convertvector(dim % 32 < 16 ? both & 15 : both >> 4, Vec) - middle_code(4);
  } else {
    const int pair = dim / 64;
    VecInt codes = load_bytes(row.codes + pair * 16 + dim % 16) >> (dim % 64 / 16 * 2) & 3;
    if constexpr (kBits == 3) codes |= load_upper_bits(row.upper + pair * 8, dim % 64) << 2;
    return __builtin_convertvector(codes, Vec) - middle_code(kBits);
  }
}

// Bytes of scales as numbers. The exponent and the fraction move to the places of an f32 number's; the factor moves the
// exponent, that of numbers without a leading one too.
inline Vec load_scales(const uint8_t* p) {
  const VecInt bytes = load_bytes(p);
  const Vec numbers = reinterpret_cast<Vec>(bytes << 20) * 0x1p108f;
  const VecInt nan = bytes == kNanScale;
  return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(numbers) | (nan & 0x7fc00000));
}

// A block of keys, or of values, and the block that will be read after it.
template <int kBits>
struct QuantizedRows {
  const uint8_t* codes;
  const uint8_t* upper;
  const float* scales;  // [token, group]
  const uint8_t* next;
  int groups;
  int row_bytes;
  int upper_bytes;
  int count = kQuantizedBlockTokens;

  Vec at(int token, int d) const {
    const CodeRow row{codes + token * row_bytes, upper + token * upper_bytes};
    return load_codes<kBits>(row, d) * scales[token * groups + d / kQuantizedGroupDims];
  }
  template <int kRows>
  void fetch_next(int token, int first, int elements) const {
    const uint8_t* from = next + token * (row_bytes + upper_bytes) + first * kBits / 8;
    for (int byte = 0; byte < elements * kBits / 8; byte += 64) __builtin_prefetch(from + byte, 0, 2);
  }
};

// A pool of blocks of keys, or of values, of kBits each.
template <int kBits>
class QuantizedPool {
 public:
  QuantizedPool(const void* pool, int head_dim) : pool_(static_cast<const uint8_t*>(pool)), head_dim_(head_dim) {}

  const uint8_t* block(int32_t number) const { return pool_ + number * quantized_block_bytes(head_dim_, kBits); }

  // Writes the block's scales as numbers to `scales`.
  QuantizedRows<kBits> open(int32_t number, const uint8_t* next, float* scales) const {
    const uint8_t* codes = block(number);
    const uint8_t* bytes = codes + scale_offset(head_dim_, kBits);
    const int groups = quantized_groups(head_dim_);
    for (int i = 0; i < kQuantizedBlockTokens * groups; i += kLanes) store(scales + i, load_scales(bytes + i));
    return {codes,  codes + upper_offset(head_dim_, kBits),  scales, next,
            groups, code_row_bytes(head_dim_, kBits), upper_row_bytes(head_dim_, kBits)};
  }

 private:
  const uint8_t* pool_;
  int head_dim_;
};

}  // namespace KV_ISA
}  // namespace kv
