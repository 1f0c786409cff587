// Sub-vectors of a step's tokens, looked up by their codes: two neighbouring dims of each token at a time, as f32 numbers.
#pragma once

#include "shared/coded-keys/coded-keys.cpu.h"

namespace kv {
namespace KV_ISA {

// Tokens that are scored at once: their sums stay in registers.
constexpr int kStepTokens = kLanes == 16 ? 32 : kLanes;

// Where the sub-vectors of a step's codes in a chunk lie in their book, in bytes.
typedef int32_t StepPlaces[kChunkGroups][kStepTokens];

// The words of kLanes streams of a chunk, from `words` on: lane 4 * octet + quad. A chunk with fewer than four quads lends
// the last one to all others.
inline VecInt load_words(const uint32_t* words, int quads) {
  VecInt v;
  if (quads == 4) {
    std::memcpy(&v, words, sizeof v);
  } else {
    for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int32_t>(words[i / 4 * quads + (i % 4 < quads ? i % 4 : quads - 1)]);
  }
  return v;
}

// What a chunk's codes are unpacked with.
struct ChunkCodes {
  int bits;
  int quads;
  int most_code;  // a code beyond counts as that
  int centroid_bytes;
};

// Unpacks the codes of kLanes tokens of a tile of a chunk, of which `words` are those from an octet on. kBits, kQuads and
// kBytes are those of the chunk, or 0 for any: known beforehand, they settle every shift, and no code is beyond the most.
template <int kTile, int kBits, int kQuads, int kBytes>
void unpack_tile(const ChunkCodes& chunk, const uint32_t* words, int32_t* places) {
  typedef uint32_t VecWord __attribute__((vector_size(kLanes * 4)));
  const int bits = kBits == 0 ? chunk.bits : kBits;
  const int quads = kQuads == 0 ? chunk.quads : kQuads;
  const int centroid_bytes = kBytes == 0 ? chunk.centroid_bytes : kBytes;
#pragma GCC unroll 4
  for (int g = 0; g < kQuadGroups; ++g) {
    Vec rows[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const int bit = (kStreamCodes / 2 * kTile + 4 * t + g) * bits;
      const int shift = bit % 32;
      const uint32_t* word = words + bit / 32 * kChunkOctets * quads;
      VecWord v = reinterpret_cast<VecWord>(load_words(word, quads)) >> shift;
      if (shift + bits > 32) v |= reinterpret_cast<VecWord>(load_words(word + kChunkOctets * quads, quads)) << (32 - shift);
      VecInt code = reinterpret_cast<VecInt>(v) & ((1 << bits) - 1);
      if (kBits == 0) code = code < chunk.most_code ? code : chunk.most_code - VecInt{};
      rows[t] = reinterpret_cast<Vec>(code * centroid_bytes);
    }
    transpose_quads(rows);
    for (int quad = 0; quad < 4; ++quad) std::memcpy(places + (quad * kQuadGroups + g) * kStepTokens, &rows[quad], sizeof(Vec));
  }
}

// Unpacks the codes of a chunk of the step that begins with the token `first` of its block. kSubDim is the number of dims
// of a sub-vector, or 0 for any.
template <int kSubDim>
void unpack(const CodedKeys& coded, const uint32_t* block, int number, int first, StepPlaces& places) {
  const ChunkCodes chunk{coded.code_bits, quads_of_chunk(coded.groups(), number), coded.centroid_count - 1, 2 * coded.sub_dim};
  const bool is_common = kSubDim != 0 && chunk.quads == 4 && chunk.bits == 13 && coded.centroid_count == kMostCentroids;
  const auto unpack = is_common ? (first < 32 ? unpack_tile<0, 13, 4, 2 * kSubDim> : unpack_tile<1, 13, 4, 2 * kSubDim>)
                                : (first < 32 ? unpack_tile<0, 0, 0, 0> : unpack_tile<1, 0, 0, 0>);
  const uint32_t* words = block + chunk_offset(number, chunk.bits) + first % 32 / 4 * chunk.quads;
  for (int token = 0; token < kStepTokens; token += kLanes) unpack(chunk, words + token / 4 * chunk.quads, places[0] + token);
}

// Two neighbouring dims of the sub-vectors of kPairTokens tokens, in f16.
constexpr int kPairTokens = kLanes / 2;
typedef int32_t Pairs __attribute__((vector_size(kLanes * 2)));

inline Vec numbers_of(Pairs pairs) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(kAllLanes, reinterpret_cast<__m256i>(pairs));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(pairs));
#else
  // The sign stays, and the factor moves the exponent, that of numbers without a leading one too.
  const VecInt high = load_bits(reinterpret_cast<const Half*>(&pairs)) << 16;
  return reinterpret_cast<Vec>(high >> 3 & static_cast<int32_t>(0x8fffe000)) * 0x1p112f;
#endif
}

#if defined(__AVX2__)
// Loads bound scores, so places are loaded two at a time.
struct TwoPlaces {
  uint64_t first, second;
  explicit TwoPlaces(const int32_t* places) {
    uint64_t both;
    std::memcpy(&both, places, sizeof both);
    first = static_cast<uint32_t>(both);
    second = both >> 32;
  }
};
#endif

__attribute__((always_inline)) inline Pairs load_twos(const uint8_t* book, const int32_t* places) {
#if defined(__AVX512F__)
  // A masked broadcast is not a shuffle, of which Intel's processors begin one at a time.
  const auto load = [&](uint64_t at) { return _mm_loadu_si32(book + at); };
  const TwoPlaces a(places), b(places + 2), c(places + 4), d(places + 6);
  __m256i low = _mm256_castsi128_si256(load(a.first)), high = _mm256_broadcastd_epi32(load(c.first));
  low = _mm256_mask_broadcastd_epi32(low, 1 << 1, load(a.second));
  low = _mm256_mask_broadcastd_epi32(low, 1 << 2, load(b.first));
  low = _mm256_mask_broadcastd_epi32(low, 1 << 3, load(b.second));
  high = _mm256_mask_broadcastd_epi32(high, 1 << 5, load(c.second));
  high = _mm256_mask_broadcastd_epi32(high, 1 << 6, load(d.first));
  high = _mm256_mask_broadcastd_epi32(high, 1 << 7, load(d.second));
  return reinterpret_cast<Pairs>(_mm256_blend_epi32(low, high, 0xf0));
#elif defined(__AVX2__)
  const auto load = [&](uint64_t at) {
    int32_t pair;
    std::memcpy(&pair, book + at, sizeof pair);
    return pair;
  };
  const TwoPlaces a(places), b(places + 2);
  const __m128i two = _mm_insert_epi32(_mm_cvtsi32_si128(load(a.first)), load(a.second), 1);
  return reinterpret_cast<Pairs>(_mm_insert_epi32(_mm_insert_epi32(two, load(b.first), 2), load(b.second), 3));
#else
  Pairs pairs = {};
  for (int i = 0; i < kPairTokens; ++i) {
    int32_t pair;
    std::memcpy(&pair, book + places[i], sizeof pair);
    pairs[i] = pair;
  }
  return pairs;
#endif
}

// The first and the second two dims of sub-vectors of four.
struct TwoPairs {
  Pairs first;
  Pairs second;
};

__attribute__((always_inline)) inline TwoPairs load_fours(const uint8_t* book, const int32_t* places) {
#if defined(__AVX512F__)
  const auto load = [&](uint64_t at) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(book + at)); };
  const auto load_four = [&](int token) {
    const TwoPlaces a(places + token), b(places + token + 4);
    __m256i tokens = _mm256_castsi128_si256(load(a.first));
    tokens = _mm256_mask_broadcastq_epi64(tokens, 1 << 1, load(a.second));
    tokens = _mm256_mask_broadcastq_epi64(tokens, 1 << 2, load(b.first));
    return _mm256_castsi256_ps(_mm256_mask_broadcastq_epi64(tokens, 1 << 3, load(b.second)));
  };
  const __m256 a = load_four(0), b = load_four(2);
  return {reinterpret_cast<Pairs>(_mm256_shuffle_ps(a, b, 0x88)), reinterpret_cast<Pairs>(_mm256_shuffle_ps(a, b, 0xdd))};
#elif defined(__AVX2__)
  const auto load_two = [&](int token) {
    const TwoPlaces at(places + token);
    const auto dims = [&](uint64_t from) { return reinterpret_cast<const double*>(book + from); };
    return _mm_castpd_ps(_mm_loadh_pd(_mm_load_sd(dims(at.first)), dims(at.second)));
  };
  const __m128 a = load_two(0), b = load_two(2);
  return {reinterpret_cast<Pairs>(_mm_shuffle_ps(a, b, 0x88)), reinterpret_cast<Pairs>(_mm_shuffle_ps(a, b, 0xdd))};
#else
  return {load_twos(book, places), load_twos(book + 4, places)};
#endif
}

// Of any number of dims, those from `dim` on. An odd last one stands beside a 0.
inline Pairs load_any(const uint8_t* book, const int32_t* places, int dim, int sub_dim) {
  int32_t pairs[kPairTokens] = {};
  const size_t bytes = dim + 1 < sub_dim ? 4 : 2;
  for (int i = 0; i < kPairTokens; ++i) std::memcpy(pairs + i, book + places[i] + 2 * dim, bytes);
  Pairs v;
  std::memcpy(&v, pairs, sizeof v);
  return v;
}

}  // namespace KV_ISA
}  // namespace kv
