// Reads vectors of 2:4 sparse blocks (shared/blocks-24/blocks-24.h) without expanding the block. Metadata become
// indices. For each kept dim of a key, an index picks the query's dim. For each dim of a value, an index picks the
// weight of the kept token.
#pragma once

#include "shared/blocks-24/blocks-24.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

#if defined(__AVX512F__)

// Reorders the metadata of a block of keys into picks[token, head_dim / 32]. A word covers 32 dims of one token, with
// two bits for each of the 16 lanes of load_kept_dims.
inline void load_picks(const uint32_t* metadata, int head_dim, uint32_t* picks) {
  const int words = head_dim / 64;   // words of each lane of metadata
  const int pairs = head_dim / 32;   // pairs of chunks of a token
  const int tokens = 8 / pairs;      // tokens that eight lanes hold
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
    // The first eight lanes hold the tokens 0 to 7 of a tile, the other lanes the tokens 8 to 15.
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

// The kept dims of a token among the 32 dims from 32 * pair on. The swizzle may have put the last eight first. They
// then come first here too, and so do their bits in the token's word of load_picks.
template <class T>
inline Vec load_kept_dims(const T* non_zeros, int token, int pair, int head_dim) {
  const int swizzle = head_dim == 128 ? token & 7 : (token >> 1) & 3;
  return load(non_zeros + token * head_dim / 2 + (pair ^ (swizzle >> 1)) * 16);
}

// For each lane of load_kept_dims, which of the 32 dims it holds.
inline VecInt picked_dims(uint32_t pick, int token, int head_dim) {
  const bool swapped = (head_dim == 128 ? token & 1 : (token >> 1) & 1) != 0;
  const __m512i bits = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i first = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
  const __m512i second = _mm512_setr_epi32(16, 16, 20, 20, 24, 24, 28, 28, 0, 0, 4, 4, 8, 8, 12, 12);
  const __m512i word = _mm512_set1_epi32(static_cast<int32_t>(pick));
  const VecInt within = reinterpret_cast<VecInt>(_mm512_maskz_srlv_epi32(kAllLanes, word, bits)) & 3;
  return within | reinterpret_cast<VecInt>(swapped ? second : first);
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
