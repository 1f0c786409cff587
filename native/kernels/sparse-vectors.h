// Vectors of 2:4 sparse blocks (kernels/mixed-blocks.h), read without writing the block out: metadata become
// indices that pick, for each kept dim of a key, the query's, and for each dim of a value the weight of the token
// that was kept.
#pragma once

#include "kernels/mixed-blocks.h"
#include "kernels/simd.h"

namespace kv {
namespace KV_ISA {

#if defined(__AVX512F__)

// The metadata of a block of keys, 32 dims of a token in each word: picks[token, head_dim / 32]. Two bits for each of
// the 16 lanes of load_kept_dims.
inline void load_picks(const uint32_t* metadata, int head_dim, uint32_t* picks) {
  const int words = head_dim / 64;   // of a lane of metadata
  const int pairs = head_dim / 32;   // of chunks of a token
  const int tokens = 8 / pairs;      // that eight lanes hold
  VecInt low = {};
  VecInt swap = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    const int token = lane % 8 / pairs;
    const int pair = lane % pairs;
    low[lane] = (4 * token + 2 * (pair % 2)) * words + pair / 2;
    swap[lane] = head_dim == 128 ? token % 2 * 16 : token / 2 % 2 * 16;
  }
  const VecInt high = low + words;
  const VecInt low_half = VecInt{} + 0xffff;
  for (int from = 0; from < 2 * head_dim; from += kLanes) {
    const __m512i both = _mm512_loadu_si512(metadata + from);
    const __m512i x = _mm512_maskz_permutexvar_epi32(kAllLanes, reinterpret_cast<__m512i>(low), both);
    const __m512i y = _mm512_maskz_permutexvar_epi32(kAllLanes, reinterpret_cast<__m512i>(high), both);
    // The first eight lanes are of the tokens 0 to 7 of a tile, the others of 8 to 15.
    const VecInt first = (reinterpret_cast<VecInt>(x) & low_half) | (reinterpret_cast<VecInt>(y) << 16);
    const VecInt second = reinterpret_cast<VecInt>(_mm512_maskz_srli_epi32(kAllLanes, x, 16)) |
                          (reinterpret_cast<VecInt>(y) & ~low_half);
    const __m512i of_tokens = _mm512_mask_blend_epi32(0xff00, reinterpret_cast<__m512i>(first),
                                                      reinterpret_cast<__m512i>(second));
    const __m512i swapped = _mm512_maskz_rolv_epi32(kAllLanes, of_tokens, reinterpret_cast<__m512i>(swap));
    const int tile = from / (32 * words);
    const int token = from % (32 * words) / kLanes * tokens;
    uint32_t* to = picks + (16 * tile + token) * pairs;
    uint32_t lanes[kLanes];
    std::memcpy(lanes, &swapped, sizeof lanes);
    std::memcpy(to, lanes, sizeof lanes / 2);
    std::memcpy(to + 8 * pairs, lanes + 8, sizeof lanes / 2);
  }
}

// A token's kept dims among the 32 from 32 * pair on. The swizzle may have put the last eight first: then so are they
// here, and so are their bits in the token's word of load_picks.
template <class T>
inline Vec load_kept_dims(const T* non_zeros, int token, int pair, int head_dim) {
  const int swizzle = head_dim == 128 ? token & 7 : (token >> 1) & 3;
  return load(non_zeros + token * head_dim / 2 + (pair ^ (swizzle >> 1)) * 16);
}

// Which of 32 dims the lanes of load_kept_dims are.
inline VecInt picked_dims(uint32_t pick, int token, int head_dim) {
  const bool swapped = (head_dim == 128 ? token & 1 : (token >> 1) & 1) != 0;
  const __m512i bits = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i first = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
  const __m512i second = _mm512_setr_epi32(16, 16, 20, 20, 24, 24, 28, 28, 0, 0, 4, 4, 8, 8, 12, 12);
  const __m512i word = _mm512_set1_epi32(static_cast<int32_t>(pick));
  const VecInt within = reinterpret_cast<VecInt>(_mm512_maskz_srlv_epi32(kAllLanes, word, bits)) & 3;
  return within | reinterpret_cast<VecInt>(swapped ? second : first);
}

#else

#if defined(__AVX2__)
// For each byte of metadata, the byte shuffle that spreads four elements of 16 bits over the eight dims that it is of.
struct Spreads {
  uint8_t of[256][16];
};
constexpr Spreads make_spreads() {
  Spreads spreads = {};
  for (int byte = 0; byte < 256; ++byte) {
    for (int place = 0; place < 16; ++place) spreads.of[byte][place] = 128;  // a zero
    for (int kept = 0; kept < 4; ++kept) {
      const int dim = kept / 2 * 4 + (byte >> 2 * kept & 3);
      spreads.of[byte][2 * dim] = static_cast<uint8_t>(2 * kept);
      spreads.of[byte][2 * dim + 1] = static_cast<uint8_t>(2 * kept + 1);
    }
  }
  return spreads;
}
alignas(16) constexpr Spreads kSpreads = make_spreads();

inline __m256 widen(__m128i bits, Half) { return _mm256_cvtph_ps(bits); }
inline __m256 widen(__m128i bits, Bfloat) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
#endif

// The dims d .. d + kLanes - 1 of a key of a sparse block, zero where nothing is kept; d is a multiple of kLanes.
template <class T>
inline Vec load_key(const T* non_zeros, const uint32_t* metadata, int token, int d, int head_dim) {
  const Meta16Place place = key_meta16(token, d / 16, head_dim);
  const uint32_t meta = metadata[place.word] >> (place.shift + d % 16);
  const T* kept = non_zeros + key_non_zero(token, d / 2, head_dim);
#if defined(__AVX2__)
  const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kept));
  const __m128i control = _mm_load_si128(reinterpret_cast<const __m128i*>(kSpreads.of[meta & 255]));
  return widen(_mm_shuffle_epi8(four, control), T{});
#else
  Vec dims = {};
  for (int n = 0; n < kLanes / 2; ++n) dims[n / 2 * 4 + static_cast<int>(meta >> 2 * n & 3)] = to_float(kept[n]);
  return dims;
#endif
}

#endif  // __AVX512F__

// The kept token `kept` of the dims d .. d + kLanes - 1 of a block of values; d is a multiple of kLanes.
template <class T>
inline Vec load_kept(const T* non_zeros, int kept, int d) {
#if defined(__AVX512F__)
  // Sixteen dims are two chunks, which the swizzle of an odd row has put in the other order.
  const Vec both = load(non_zeros + value_non_zero(kept & ~1, d & ~8) + (kept & 1) * 64);
  return (kept & 1) == 0 ? both : reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, both, both, 0x4e));
#else
  return load(non_zeros + value_non_zero(kept, d));
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
