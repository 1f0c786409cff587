// Vectors of 2:4 sparse blocks (kernels/mixed-blocks.h), read without writing the block out: sixteen bits of metadata
// become a mask that spreads eight non-zeros over sixteen dims of a key, or indices that pick, for each dim of a value,
// the weight of the token that was kept.
#pragma once

#include "kernels/mixed-blocks.h"
#include "kernels/simd.h"

namespace kv {
namespace KV_ISA {

// For each byte of metadata, two groups of four, the byte with a bit set for each index that is kept.
struct KeptMasks {
  uint8_t of[256];
};
constexpr KeptMasks make_kept_masks() {
  KeptMasks masks = {};
  for (int byte = 0; byte < 256; ++byte) {
    const int low = (1 << (byte & 3)) | (1 << (byte >> 2 & 3));
    const int high = (1 << (byte >> 4 & 3)) | (1 << (byte >> 6));
    masks.of[byte] = static_cast<uint8_t>(low | high << 4);
  }
  return masks;
}
constexpr KeptMasks kKeptMasks = make_kept_masks();

// Turns each meta16 of a block of keys, 4 * head_dim of them, into the mask of the dims that are kept. The mask of
// key_meta16(token, group) is at 2 * word + shift / 16.
inline void load_key_masks(const uint32_t* metadata, int head_dim, uint16_t* masks) {
  uint8_t bytes[8 * 128];
  const int count = 8 * head_dim;
  std::memcpy(bytes, metadata, static_cast<size_t>(count));
#if defined(__AVX512F__)
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i low_masks = _mm512_maskz_broadcast_i32x4(
      kAllLanes, _mm_setr_epi8(1, 3, 5, 9, 3, 2, 6, 10, 5, 6, 4, 12, 9, 10, 12, 8));
  for (int i = 0; i < count; i += 64) {
    const __m512i meta = _mm512_loadu_si512(bytes + i);
    const __m512i low = _mm512_shuffle_epi8(low_masks, _mm512_and_si512(meta, nibble));
    const __m512i shifted = _mm512_maskz_srli_epi16(~0u, meta, 4);
    const __m512i high = _mm512_shuffle_epi8(low_masks, _mm512_and_si512(shifted, nibble));
    _mm512_storeu_si512(bytes + i, _mm512_or_si512(low, _mm512_maskz_slli_epi16(~0u, high, 4)));
  }
#else
  for (int i = 0; i < count; ++i) bytes[i] = kKeptMasks.of[bytes[i]];
#endif
  std::memcpy(masks, bytes, static_cast<size_t>(count));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each mask of eight dims, the byte shuffle that spreads four elements of 16 bits over them.
struct Spreads {
  uint8_t of[256][16];
};
constexpr Spreads make_spreads() {
  Spreads spreads = {};
  for (int mask = 0; mask < 256; ++mask) {
    int next = 0;
    for (int d = 0; d < 8; ++d) {
      const bool kept = (mask >> d & 1) != 0 && next < 8;
      spreads.of[mask][2 * d] = static_cast<uint8_t>(kept ? 2 * next : 128);
      spreads.of[mask][2 * d + 1] = static_cast<uint8_t>(kept ? 2 * next + 1 : 128);
      next += kept ? 1 : 0;
    }
  }
  return spreads;
}
alignas(16) constexpr Spreads kSpreads = make_spreads();
#endif

#if defined(__AVX2__)
inline __m256 widen(__m128i bits, Half) { return _mm256_cvtph_ps(bits); }
inline __m256 widen(__m128i bits, Bfloat) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
#endif

// kLanes dims, of which those of `mask` (its lowest kLanes bits) are kept, one after the other at `kept`.
template <class T>
inline Vec spread(const T* kept, uint32_t mask) {
#if defined(__AVX512F__)
  const __m256 eight = widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kept)), T{});
  return _mm512_maskz_expand_ps(static_cast<__mmask16>(mask), _mm512_castps256_ps512(eight));
#elif defined(__AVX2__)
  const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kept));
  const __m128i control = _mm_load_si128(reinterpret_cast<const __m128i*>(kSpreads.of[mask & 255]));
  return widen(_mm_shuffle_epi8(four, control), T{});
#else
  Vec result = {};
  int next = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) != 0) result[lane] = to_float(kept[next++]);
  }
  return result;
#endif
}

// The kept token `kept` of the dims d .. d + kLanes - 1 of a block of values; d is a multiple of kLanes.
template <class T>
inline Vec load_kept(const T* non_zeros, int kept, int d) {
  const T* first = non_zeros + value_non_zero(kept, d);
#if defined(__AVX512F__)
  // Sixteen dims are two chunks, which the swizzle may have put in either order.
  const __m256 low = widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)), T{});
  const T* second = non_zeros + value_non_zero(kept, d + 8);
  const __m256 high = widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(second)), T{});
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#else
  return load(first);
#endif
}

// For each of the dims d .. d + kLanes - 1, the meta16 of a group of 16 tokens in the lane's lowest bits; what is
// above them has no meaning.
inline VecInt load_value_meta(const uint32_t* metadata, int d, int group) {
#if defined(__AVX512F__)
  const uint32_t* words = metadata + value_meta16(d, group).word;
  const __m512i step = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
  const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
  // The words that are wanted lie among 29.
  const __m512i low = _mm512_loadu_si512(words);
  const __m512i high = _mm512_maskz_loadu_epi32(0x1fff, words + 16);
  const __m512i both = _mm512_permutex2var_epi32(low, step, high);
  return reinterpret_cast<VecInt>(_mm512_maskz_srlv_epi32(kAllLanes, both, shift));
#else
  VecInt meta;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Meta16Place place = value_meta16(d + lane, group);
    meta[lane] = static_cast<int32_t>(metadata[place.word] >> place.shift);
  }
  return meta;
#endif
}

// The same four floats in every four lanes.
inline Vec load_quad(const float* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_broadcast_f32x4(kAllLanes, _mm_loadu_ps(p));
#elif defined(__AVX2__)
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#else
  return load(p);
#endif
}

// In each lane, that of its four lanes which the lane's lowest two bits of `index` say.
inline Vec pick(Vec quads, VecInt index) {
#if defined(__AVX512F__)
  return _mm512_maskz_permutevar_ps(kAllLanes, quads, reinterpret_cast<__m512i>(index));
#elif defined(__AVX2__)
  return _mm256_permutevar_ps(quads, reinterpret_cast<__m256i>(index));
#else
  return permute(quads, quads, index & 3);
#endif
}

}  // namespace KV_ISA
}  // namespace kv
