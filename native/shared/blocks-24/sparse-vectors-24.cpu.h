// Reads vectors of 2:4 sparse blocks (shared/blocks-24/blocks-24.h) without expanding the block. Metadata become
// indices. For each kept dim of a key, an index picks the query's dim. For each dim of a value, an index picks the
// weight of the kept token.
#pragma once

#include "shared/blocks-24/blocks-24.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

#if defined(__AVX512F__)

// Tokens of a tile of 16 whose kept dims are read together: pair p is a token and the one eight after it, whose metadata share
// words. `odd` says whether the swizzle has exchanged each two chunks of the row.
constexpr int kTokenPairs = 4;
constexpr int pair_token(int p, int odd, int head_dim) {
  return head_dim == 128 ? 2 * p + odd : p / 2 * 4 + p % 2 + 2 * odd;
}

// Where a token of a tile is among the scores of a row: eight of even pairs, then eight of odd ones, in the order of
// score_sparse_dims.
constexpr int pair_place(int token, int head_dim) {
  const int t = token % 8;
  const int p = head_dim == 128 ? t / 2 : t / 4 * 2 + t % 2;
  const int odd = head_dim == 128 ? t % 2 : t / 2 % 2;
  return odd * 8 + p / 2 * 4 + token / 8 * 2 + p % 2;
}

inline Vec widen(Half, __m256i elements) { return _mm512_maskz_cvtph_ps(kAllLanes, elements); }
inline Vec widen(Bfloat, __m256i elements) {
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAllLanes, _mm512_maskz_cvtepu16_epi32(kAllLanes, elements), 16));
}

// The kept dims of two tokens of a pair among the 32 dims from 32 * part on: of two of each four quads in kept[0], of the others
// in kept[1]. Each 128 bits are of one quad: the first kept dim of the first and of the second token, then the second kept dim of both.
template <int kDim, class T>
inline Vec load_kept_pair(const T* non_zeros, int token, int part, int v) {
  const int swizzle = kDim == 128 ? token & 7 : (token >> 1) & 3;
  const T* first = non_zeros + token * (kDim / 2) + (part ^ (swizzle >> 1)) * 16;
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + 4 * kDim));
  return widen(T{}, v == 0 ? _mm256_unpacklo_epi16(x, y) : _mm256_unpackhi_epi16(x, y));
}

// For each lane of load_kept_pair with v = 0, which of the quad's four dims it holds, in the lane's lowest two bits; eight bits
// above are those for v = 1. The other bits have no meaning. `words` is the metadata of the tile.
template <int kDim>
inline VecInt picked_dims_of_pair(const uint32_t* words, int token, int part, int odd) {
  const uint32_t* even_word = words + key_meta16(token, 2 * part, kDim).word;
  const uint32_t* odd_word = words + key_meta16(token, 2 * part + 1, kDim).word;
  const __m512i shifts = _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 0, 16, 2, 18, 4, 20, 6, 22);
  const auto each = [](const uint32_t* word) __attribute__((always_inline)) {
    return _mm_castps_si128(_mm_load_ss(reinterpret_cast<const float*>(word)));
  };
  const __m512i first = _mm512_maskz_broadcastd_epi32(kAllLanes, each(odd != 0 ? odd_word : even_word));
  const __m512i both = _mm512_mask_broadcastd_epi32(first, 0xff00, each(odd != 0 ? even_word : odd_word));
  return reinterpret_cast<VecInt>(_mm512_maskz_srlv_epi32(kAllLanes, both, shifts));
}

// The dims of queries in the orders of load_kept_pair, for pairs that are not odd, then for odd ones.
template <int kDim>
inline void order_quads(const float* queries, int64_t rows, float* ordered) {
  for (int64_t row = 0; row < rows; ++row, queries += kDim, ordered += 2 * kDim) {
    for (int d = 0; d < kDim; d += 32) {
      const __m512 x = load(queries + d), y = load(queries + d + kLanes);
      store(ordered + d, _mm512_maskz_shuffle_f32x4(kAllLanes, x, y, 0x44));
      store(ordered + d + kLanes, _mm512_maskz_shuffle_f32x4(kAllLanes, x, y, 0xee));
      store(ordered + kDim + d, _mm512_maskz_shuffle_f32x4(kAllLanes, y, x, 0x44));
      store(ordered + kDim + d + kLanes, _mm512_maskz_shuffle_f32x4(kAllLanes, y, x, 0xee));
    }
  }
}

#elif defined(__AVX2__)

// The kept dims of two tokens among the same 16 dims, eight of each token. A register half has four lanes, two of
// each token, all of the same quad of dims. kept_quad says which quad.
inline void load_kept_pair(const Half* first, const Half* second, Vec* kept) {
  const __m256d x = reinterpret_cast<__m256d>(load(first));
  const __m256d y = reinterpret_cast<__m256d>(load(second));
  kept[0] = reinterpret_cast<Vec>(_mm256_unpacklo_pd(x, y));
  kept[1] = reinterpret_cast<Vec>(_mm256_unpackhi_pd(x, y));
}
inline void load_kept_pair(const Bfloat* first, const Bfloat* second, Vec* kept) {
  const __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)));
  const __m256i y = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(second)));
  const __m256i widened = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                           -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  kept[0] = reinterpret_cast<Vec>(_mm256_shuffle_epi8(_mm256_unpacklo_epi32(x, y), widened));
  kept[1] = reinterpret_cast<Vec>(_mm256_shuffle_epi8(_mm256_unpackhi_epi32(x, y), widened));
}

// Which quad of the 16 dims a half of a vector of load_kept_pair holds.
constexpr int kept_quad(Half, int vector, int half) { return vector + 2 * half; }
constexpr int kept_quad(Bfloat, int vector, int half) { return 2 * vector + half; }

// For each lane of load_kept_pair, which of the quad's four dims it holds, in the lane's lowest two bits. The bits
// above have no meaning. `word` holds the meta16 of both tokens.
template <class T>
inline VecInt picked_dims_of_pair(uint32_t word, int vector) {
  VecInt shifts = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    shifts[lane] = 4 * kept_quad(T{}, vector, lane / 4) + lane % 2 * 2 + lane / 2 % 2 * 16;
  }
  const __m256i both = _mm256_set1_epi32(static_cast<int32_t>(word));
  return reinterpret_cast<VecInt>(_mm256_srlv_epi32(both, reinterpret_cast<__m256i>(shifts)));
}

#else

// The dims d .. d + kLanes - 1 of a key of a sparse block, with zeros for dims that are not kept. d is a multiple of
// kLanes.
template <class T>
inline Vec load_key(const T* non_zeros, const uint32_t* metadata, int token, int d, int head_dim) {
  const Meta16Place place = key_meta16(token, d / 16, head_dim);
  const uint32_t meta = metadata[place.word] >> (place.shift + d % 16);
  const T* kept = non_zeros + key_non_zero(token, d / 2, head_dim);
  Vec dims = {};
  for (int n = 0; n < kLanes / 2; ++n) dims[n / 2 * 4 + static_cast<int>(meta >> 2 * n & 3)] = to_float(kept[n]);
  return dims;
}

#endif  // __AVX512F__

// Vector v of the dims from `first` on, in a block of values: the j-th kept token of the tokens 4 quad .. 4 quad + 3.
// `first` is a multiple of two vectors.
template <class T>
inline Vec load_kept(const T* non_zeros, int quad, int j, int first, int v) {
#if defined(__AVX512F__)
  // Sixteen dims are two chunks. The swizzle has exchanged these in odd rows.
  const Vec both = load(non_zeros + value_non_zero(2 * quad, first + v * kLanes) + j * 64);
  return j == 0 ? both : reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, both, both, 0x4e));
#elif defined(__AVX2__)
  return load(non_zeros + value_non_zero(2 * quad, first + v / 2 * 16) + j * 64 + (v % 2 ^ j) * 8);
#else
  return load(non_zeros + value_non_zero(2 * quad + j, first + v * kLanes));
#endif
}

// The metadata of a block of values, for the dims from `first` on, which is a multiple of two vectors. The lowest
// bits of each lane of at(v, group) are the meta16 of a group of 16 tokens. The bits above have no meaning.
#if defined(__AVX2__) && !defined(__AVX512F__)
class ValueMeta {
 public:
  // Two vectors share the same words, so eight dims of four groups are transposed once for both.
  ValueMeta(const uint32_t* metadata, int first) {
    const uint32_t* words = metadata + value_meta16(first, 0).word;
    __m256i dims[4];
    for (int d = 0; d < 4; ++d) {
      dims[d] = _mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(words + 4 * (d + 4)),
                                    reinterpret_cast<const __m128i*>(words + 4 * d));
    }
    const __m256i low01 = _mm256_unpacklo_epi32(dims[0], dims[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(dims[2], dims[3]);
    const __m256i high01 = _mm256_unpackhi_epi32(dims[0], dims[1]);
    const __m256i high23 = _mm256_unpackhi_epi32(dims[2], dims[3]);
    groups_[0] = reinterpret_cast<VecInt>(_mm256_unpacklo_epi64(low01, low23));
    groups_[1] = reinterpret_cast<VecInt>(_mm256_unpackhi_epi64(low01, low23));
    groups_[2] = reinterpret_cast<VecInt>(_mm256_unpacklo_epi64(high01, high23));
    groups_[3] = reinterpret_cast<VecInt>(_mm256_unpackhi_epi64(high01, high23));
  }

  VecInt at(int v, int group) const { return groups_[group] >> 16 * v; }

 private:
  VecInt groups_[4];
};
#else
class ValueMeta {
 public:
  ValueMeta(const uint32_t* metadata, int first) : metadata_(metadata), first_(first) {}

  VecInt at(int v, int group) const {
    const int d = first_ + v * kLanes;
#if defined(__AVX512F__)
    const uint32_t* words = metadata_ + value_meta16(d, group).word;
    const __m512i step = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
    // The wanted words are among 29 consecutive ones.
    const __m512i low = _mm512_loadu_si512(words);
    const __m512i high = _mm512_maskz_loadu_epi32(0x1fff, words + 16);
    const __m512i both = _mm512_permutex2var_epi32(low, step, high);
    return reinterpret_cast<VecInt>(_mm512_maskz_srlv_epi32(kAllLanes, both, shift));
#else
    VecInt meta;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Meta16Place place = value_meta16(d + lane, group);
      meta[lane] = static_cast<int32_t>(metadata_[place.word] >> place.shift);
    }
    return meta;
#endif
  }

 private:
  const uint32_t* metadata_;
  int first_;
};
#endif

// The same four floats in each four lanes.
inline Vec load_quad(const float* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_broadcast_f32x4(kAllLanes, _mm_loadu_ps(p));
#elif defined(__AVX2__)
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#else
  return load(p);
#endif
}

// For each lane, one of the four lanes of its quad: the one that the lowest two bits of `index` say.
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
