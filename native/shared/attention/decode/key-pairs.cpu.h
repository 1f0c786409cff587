// Scores of a run with AVX-512. A vector holds eight dims of each of two keys, which leaves few sums over lanes: with one
// key in a vector and heads of 64 they take as many instructions as the products.
#pragma once

#include "shared/attention/decode/lane-sums.cpu.h"

namespace kv {
namespace KV_ISA {

// Dims of keys that are scored in pairs.
constexpr int kPairedDim = 64;
// Pairs of keys that are scored at once. Pair p is the keys p and p + kKeyPairs of a group.
constexpr int kKeyPairs = 4;
constexpr int kPairedKeys = 2 * kKeyPairs;
// Sixteen dims of the keys a and b, four quads of each, are two vectors of 128 bits a quad. What takes the fewest
// instructions differs: `kFirst` and `kSecond` say which quads of a query belong to each vector, and fold(x, y) adds the two
// quads of each key: a of x, b of x, a of y, b of y.
template <class T>
struct KeyPair;

// a0 b0 a2 b2, a1 b1 a3 b3.
template <>
struct KeyPair<Half> {
  static constexpr int kFirst = 0xa0, kSecond = 0xf5;

  static void load(const Half* a, const Half* b, Vec* pair) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    pair[0] = _mm512_maskz_cvtph_ps(kAllLanes, _mm256_unpacklo_epi64(x, y));
    pair[1] = _mm512_maskz_cvtph_ps(kAllLanes, _mm256_unpackhi_epi64(x, y));
  }
  static Vec fold(Vec x, Vec y) {
    return reinterpret_cast<Vec>(_mm512_mask_blend_ps(0xff00, x, y)) +
           reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, x, y, 0x4e));
  }
};

// a0 a2 b0 b2, a1 a3 b1 b3.
template <>
struct KeyPair<Bfloat> {
  static constexpr int kFirst = 0x88, kSecond = 0xdd;

  static void load(const Bfloat* a, const Bfloat* b, Vec* pair) {
    constexpr __mmask32 kAll = 0xffffffff;
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    const __m512i both = _mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(x), y, 1);
    const __m512i zeros = _mm512_setzero_si512();
    pair[0] = _mm512_castsi512_ps(_mm512_maskz_unpacklo_epi16(kAll, zeros, both));
    pair[1] = _mm512_castsi512_ps(_mm512_maskz_unpackhi_epi16(kAll, zeros, both));
  }
  static Vec fold(Vec x, Vec y) {
    return reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, x, y, 0x88)) +
           reinterpret_cast<Vec>(_mm512_maskz_shuffle_f32x4(kAllLanes, x, y, 0xdd));
  }
};

// Queries as score_pairs takes them, for keys of type T: each vector of a pair has a vector of the query's dims, so they become
// twice as many floats.
template <class T>
inline void spread_queries(const float* queries, int64_t floats, float* spread) {
  for (int64_t d = 0; d < floats; d += kLanes) {
    const __m512 query = load(queries + d);
    store(spread + 2 * d, _mm512_maskz_shuffle_f32x4(kAllLanes, query, query, KeyPair<T>::kFirst));
    store(spread + 2 * d + kLanes, _mm512_maskz_shuffle_f32x4(kAllLanes, query, query, KeyPair<T>::kSecond));
  }
}

// score_dims with two keys of kPairedDim dims in a vector, for spread queries. Up to kPairedKeys - 1 further scores are written.
template <int kRows, class Keys>
__attribute__((noinline)) void score_pairs(const float* queries, const Keys& keys, float* scores, int64_t score_stride) {
  typedef typename Keys::Element Element;
  typedef KeyPair<Element> Pair;
  constexpr int kStepKeys = kPairedKeys * kLanes / kPairedDim;
  for (int key = 0; key < keys.count; key += kPairedKeys) {
    const Element* group[kPairedKeys];
#pragma GCC unroll 8
    for (int k = 0; k < kPairedKeys; ++k) group[k] = keys.row(key + k < keys.count ? key + k : keys.count - 1);
    const auto ahead = keys.ahead_of(key);
    Vec totals[kRows][kKeyPairs] = {};
#pragma GCC unroll 4
    for (int d = 0; d < kPairedDim; d += kLanes) {
      // A burst of as many lines as a core can wait for leaves the memory idle until the next one.
#pragma GCC unroll 2
      for (int k = 0; k < kStepKeys; ++k) keys.template fetch<kRows>(ahead, d / kLanes * kStepKeys + k, 0, kPairedDim);
      Vec loaded[kKeyPairs][2];
#pragma GCC unroll 4
      for (int p = 0; p < kKeyPairs; ++p) Pair::load(group[p] + d, group[p + kKeyPairs] + d, loaded[p]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          const Vec query = load(queries + 2 * (row * kPairedDim + d) + v * kLanes);
#pragma GCC unroll 4
          for (int p = 0; p < kKeyPairs; ++p) totals[row][p] += query * loaded[p][v];
        }
      }
    }
#pragma GCC unroll 2
    for (int row = 0; row < kRows; row += 2) {
      const Vec* second = totals[row + 1 < kRows ? row + 1 : row];
      Vec quads[kKeyPairs];
#pragma GCC unroll 4
      for (int p = 0; p < kKeyPairs; ++p) quads[p] = Pair::fold(totals[row][p], second[p]);
      // The scores of `row` are the lower half, those of the next row the upper.
      const Vec sums = sum_quads(quads[0], quads[1], quads[2], quads[3]);
      float halves[2][kPairedKeys];
      std::memcpy(halves, &sums, sizeof sums);
      std::memcpy(scores + row * score_stride + key, halves[0], sizeof halves[0]);
      if (row + 1 < kRows) std::memcpy(scores + (row + 1) * score_stride + key, halves[1], sizeof halves[1]);
    }
  }
}

}  // namespace KV_ISA
}  // namespace kv
