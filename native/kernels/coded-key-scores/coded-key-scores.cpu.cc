#include "kernels/coded-key-scores/coded-key-scores.h"

#include "runtime/workers.h"
#include "shared/coded-keys/coded-keys.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// A vector has a lane for each stream of neighbouring octets: lane 4 * octet + quad. Of a tile, it is worth four tokens
// for each octet.
constexpr int kOctets = kLanes / 4;
constexpr int kVectorTokens = 4 * kOctets;

constexpr int kTaskBlocks = 16;   // of one kv head of one batch entry
constexpr int kMostColumns = 4;   // rows and heads that are scored at once

// What the streams of a chunk are read with.
struct ChunkView {
  const uint32_t* words;
  int quads;
  int bits;
  int most_code;

  // The words of `kOctets` octets from `octet` on. A chunk with fewer than four quads lends the last one to all others,
  // whose queries are zeros.
  VecInt load(int word, int octet) const {
    const uint32_t* p = words + (word * kChunkOctets + octet) * quads;
    VecInt v;
    if (quads == 4) {
      std::memcpy(&v, p, sizeof v);
    } else {
      for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int32_t>(p[i / 4 * quads + (i % 4 < quads ? i % 4 : quads - 1)]);
    }
    return v;
  }

  VecInt codes(int octet, int place) const {
    const int bit = place * bits;
    const int word = bit / 32, shift = bit % 32;
    typedef uint32_t VecWord __attribute__((vector_size(kLanes * 4)));
    VecWord v = reinterpret_cast<VecWord>(load(word, octet)) >> shift;
    if (shift + bits > 32) v |= reinterpret_cast<VecWord>(load(word + 1, octet)) << (32 - shift);
    const VecInt code = reinterpret_cast<VecInt>(v) & ((1 << bits) - 1);
    return code < most_code ? code : most_code - VecInt{};
  }
};

// Two neighbouring f16 numbers in each lane, from `elements + place` on, with zeros in the high half where `single`.
inline VecInt gather_pair(const uint16_t* elements, VecInt place, bool single) {
  if (single) {
    VecInt v;
    for (int i = 0; i < kLanes; ++i) v[i] = elements[place[i]];
    return v;
  }
#if defined(__AVX512F__)
  return reinterpret_cast<VecInt>(_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), kAllLanes,
                                                              reinterpret_cast<__m512i>(place), elements, 2));
#elif defined(__AVX2__)
  return reinterpret_cast<VecInt>(
      _mm256_i32gather_epi32(reinterpret_cast<const int*>(elements), reinterpret_cast<__m256i>(place), 2));
#else
  VecInt v;
  for (int i = 0; i < kLanes; ++i) {
    int32_t pair;
    std::memcpy(&pair, elements + place[i], 4);
    v[i] = pair;
  }
  return v;
#endif
}

// Finite f16 numbers in the high and in the low half of each lane. The sign stays, and the factor moves the exponent,
// that of numbers without a leading one too.
inline Vec high_half(VecInt pair) {
  return reinterpret_cast<Vec>(pair >> 3 & static_cast<int32_t>(0x8fffe000)) * 0x1p112f;
}
inline Vec low_half(VecInt pair) { return high_half(pair << 16); }

// Four numbers, repeated.
inline Vec load_four(const float* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_broadcast_f32x4(kAllLanes, _mm_loadu_ps(p));
#elif defined(__AVX2__)
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#else
  return load(p);
#endif
}

// Sums each four lanes of four vectors: lane 4 * i + t of the result is the sum of the lanes 4 * i and following of
// vector t.
inline Vec sum_quads(const Vec (&sums)[4]) {
  VecInt even = {}, odd = {}, low = {}, high = {};
  for (int i = 0; i < kLanes; ++i) {
    const int first = i / 4 * 4 + i % 4 / 2 * 2;  // lanes of two vectors in turns
    even[i] = first + i % 2 * kLanes;
    odd[i] = even[i] + 1;
    low[i] = i / 4 * 4 + i % 2 + i % 4 / 2 * kLanes;
    high[i] = low[i] + 2;
  }
  const Vec a = permute(sums[0], sums[1], even) + permute(sums[0], sums[1], odd);
  const Vec b = permute(sums[2], sums[3], even) + permute(sums[2], sums[3], odd);
  return permute(a, b, low) + permute(a, b, high);
}

// Whether a vector holds whole centroids of neighbouring tokens, and not one pair of dims of each lane's centroid.
inline bool takes_whole_centroids(const CodedKeys& coded) { return coded.sub_dim == 2 || coded.sub_dim == 4; }

// The queries of one kv head of one batch entry. Column r * group + h is row r, and query head h of the group.
class Columns {
 public:
  Columns(const CodedKeyScoresArguments& a, int entry, int head)
      : group_(a.query_heads / a.kv_heads),
        count_((a.query_start[entry + 1] - a.query_start[entry]) * group_),
        chunks_(coded_chunks(a.coded.groups())),
        pairs_((a.coded.sub_dim + 1) / 2) {
    const int64_t token = a.query_start[entry];
    first_query_ = token * a.query_token_stride + int64_t{head} * group_ * a.query_head_stride;
    first_score_ = a.scores + token * a.score_token_stride + int64_t{head} * group_ * a.score_head_stride;
  }

  int count() const { return count_; }
  // Of one column in the order that it is used in: [chunk, group of the quad, pair, half, quad], or that of the dims for
  // whole centroids.
  int64_t floats() const { return int64_t{chunks_} * kChunkGroups * pairs_ * 2; }

  template <class T>
  void arrange(const CodedKeyScoresArguments& a, int head, int column, const T* query, float* to) const {
    const T* from = query + first_query_ + column / group_ * a.query_token_stride + column % group_ * a.query_head_stride;
    const float* scales = a.coded.channel_scale == nullptr ? nullptr : a.coded.channel_scale + int64_t{head} * a.head_dim;
    for (int64_t i = 0; i < floats(); ++i) {
      const int quad = i % 4, half = i / 4 % 2;
      const int pair = static_cast<int>(i / 8 % pairs_);
      const int64_t rest = i / 8 / pairs_;
      const int64_t group = rest / 4 * kChunkGroups + quad * kQuadGroups + rest % 4;
      const int of_group = 2 * pair + half;
      const int64_t dim = takes_whole_centroids(a.coded) ? i : group * a.coded.sub_dim + of_group;
      const bool there = takes_whole_centroids(a.coded) ? i < a.head_dim : group < a.coded.groups() && of_group < a.coded.sub_dim;
      to[i] = there ? to_float(from[dim]) * (scales == nullptr ? 1.0f : scales[dim]) : 0.0f;
    }
  }

  float* scores(const CodedKeyScoresArguments& a, int column) const {
    return first_score_ + column / group_ * a.score_token_stride + column % group_ * a.score_head_stride;
  }

 private:
  int group_;
  int count_;
  int chunks_;
  int pairs_;
  int64_t first_query_ = 0;
  float* first_score_ = nullptr;
};

// Scores a block of sub-vectors of any number of dims for `kColumns` columns.
template <int kColumns>
void score_any(const CodedKeyScoresArguments& a, int head, const uint32_t* block, const float* queries, int64_t stride,
                 float* const* scores) {
  const CodedKeys& coded = a.coded;
  const int sub_dim = coded.sub_dim;
  const int pairs = (sub_dim + 1) / 2;
  for (int tile = 0; tile < 2; ++tile) {
    for (int octet = 0; octet < kChunkOctets; octet += kOctets) {
      Vec sums[kColumns][4] = {};
      const float* query = queries;
      for (int number = 0; number < coded_chunks(coded.groups()); ++number) {
        const ChunkView chunk{block + chunk_offset(number, coded.code_bits), quads_of_chunk(coded.groups(), number),
                              coded.code_bits, coded.centroid_count - 1};
        for (int g = 0; g < kQuadGroups; ++g) {
          VecInt places[4];
          for (int t = 0; t < 4; ++t) places[t] = chunk.codes(octet, 16 * tile + 4 * t + g) * sub_dim;
          if (coded.books > 1) {
            for (int i = 0; i < kLanes; ++i) {
              const int group = number * kChunkGroups + i % 4 * kQuadGroups + g;
              const int book = group < coded.groups() ? group : 0;
              for (VecInt& place : places) place[i] += static_cast<int32_t>(book * coded.book_elements());
            }
          }
          const uint16_t* elements = coded.centroids + coded.book_offset(head, 0);
          for (int pair = 0; pair < pairs; ++pair, query += 8) {
            Vec low[kColumns], high[kColumns];
            for (int c = 0; c < kColumns; ++c) {
              low[c] = load_four(query + c * stride);
              high[c] = load_four(query + c * stride + 4);
            }
            for (int t = 0; t < 4; ++t) {
              const VecInt both = gather_pair(elements + 2 * pair, places[t], 2 * pair + 1 == sub_dim);
              const Vec first = low_half(both), second = high_half(both);
              for (int c = 0; c < kColumns; ++c) sums[c][t] = sums[c][t] + low[c] * first + high[c] * second;
            }
          }
        }
      }
      for (int c = 0; c < kColumns; ++c) store(scores[c] + 32 * tile + 4 * octet, sum_quads(sums[c]) * a.scale);
    }
  }
}

constexpr int kTokens = kLanes / 4;    // of which a vector holds four dims
constexpr int kVectors = 4 / kTokens;  // for the four tokens of an octet in a tile

// Four dims are a sub-vector of four or two neighbouring ones of two: their books, and the tokens' codes, which lie
// kLanes apart.
template <int kSubDim>
struct FourDims {
  const uint16_t* books[4 / kSubDim];
  const int32_t* codes[4 / kSubDim];

  const void* centroid(int part, int token) const { return books[part] + kSubDim * codes[part][kLanes * token]; }

  Vec load() const {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(kAllLanes, _mm256_inserti128_si256(_mm256_castsi128_si256(two_tokens(0)), two_tokens(2), 1));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(two_tokens(0));
#else
    Half dims[4];
    for (int part = 0; part < 4 / kSubDim; ++part) std::memcpy(dims + kSubDim * part, centroid(part, 0), 2 * kSubDim);
    return KV_ISA::load(dims);
#endif
  }

#if defined(__AVX512F__) || defined(__AVX2__)
 private:
  __m128i two_tokens(int first) const {
    if constexpr (kSubDim == 4) {
      const __m128i low = _mm_loadl_epi64(static_cast<const __m128i*>(centroid(0, first)));
      return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), static_cast<const __m64*>(centroid(0, first + 1))));
    } else {
      __m128i v = _mm_cvtsi32_si128(pair(0, first));
      v = _mm_insert_epi32(v, pair(1, first), 1);
      v = _mm_insert_epi32(v, pair(0, first + 1), 2);
      return _mm_insert_epi32(v, pair(1, first + 1), 3);
    }
  }

  int32_t pair(int part, int token) const {
    int32_t dims;
    std::memcpy(&dims, centroid(part, token), 4);
    return dims;
  }
#endif
};

// Sums the dims of each token's products: lane 4 * octet + t of the result is that of token t of an octet, of which
// vector octet * kVectors + t / kTokens has them.
inline Vec sum_dims(const Vec (&sums)[4]) {
  VecInt order = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    const int octet = lane / 4, t = lane % 4;
    order[lane] = t % kTokens * 4 + octet * kVectors + t / kTokens;
  }
  const Vec all = sum_quads(sums);
  return permute(all, all, order);
}

// Scores a block of sub-vectors of two or four dims for `kColumns` columns.
template <int kColumns, int kSubDim>
void score_whole_centroids(const CodedKeyScoresArguments& a, int head, const uint32_t* block, const float* queries,
                           int64_t stride, float* const* scores) {
  constexpr int kParts = 4 / kSubDim;
  const CodedKeys& coded = a.coded;
  const int last_group = coded.groups() - 1;
  for (int tile = 0; tile < 2; ++tile) {
    for (int octet = 0; octet < kChunkOctets; octet += kOctets) {
      Vec sums[kColumns][4] = {};
      for (int number = 0; number < coded_chunks(coded.groups()); ++number) {
        const ChunkView chunk{block + chunk_offset(number, coded.code_bits), quads_of_chunk(coded.groups(), number),
                              coded.code_bits, coded.centroid_count - 1};
        for (int g = 0; g < kQuadGroups; g += kParts) {
          int32_t codes[kParts][4][kLanes];
          for (int part = 0; part < kParts; ++part) {
            for (int t = 0; t < 4; ++t) {
              const VecInt own = chunk.codes(octet, 16 * tile + 4 * t + g + part);
              std::memcpy(codes[part][t], &own, sizeof own);
            }
          }
          for (int quad = 0; quad < chunk.quads; ++quad) {
            const int group = number * kChunkGroups + quad * kQuadGroups + g;
            if (group > last_group) break;
            Vec query[kColumns];
            for (int c = 0; c < kColumns; ++c) query[c] = load_four(queries + c * stride + kSubDim * group);
            FourDims<kSubDim> dims;
            for (int part = 0; part < kParts; ++part) {
              // What fills up a quad has queries of zeros.
              const int own = group + part < last_group ? group + part : last_group;
              dims.books[part] = coded.centroids + coded.book_offset(head, own);
            }
            for (int v = 0; v < 4; ++v) {
              for (int part = 0; part < kParts; ++part) {
                dims.codes[part] = &codes[part][v % kVectors * kTokens][v / kVectors * 4 + quad];
              }
              const Vec centroids = dims.load();
              for (int c = 0; c < kColumns; ++c) sums[c][v] = sums[c][v] + query[c] * centroids;
            }
          }
        }
      }
      for (int c = 0; c < kColumns; ++c) store(scores[c] + 32 * tile + 4 * octet, sum_dims(sums[c]) * a.scale);
    }
  }
}

template <int kColumns>
void score_columns(const CodedKeyScoresArguments& a, int head, const uint32_t* block, const float* queries, int64_t stride,
                   float* const* scores) {
  if (a.coded.sub_dim == 2) return score_whole_centroids<kColumns, 2>(a, head, block, queries, stride, scores);
  if (a.coded.sub_dim == 4) return score_whole_centroids<kColumns, 4>(a, head, block, queries, stride, scores);
  score_any<kColumns>(a, head, block, queries, stride, scores);
}

// Scores with spoilt tokens are NaN.
void spoil(const uint32_t* tokens, float* scores) {
  for (int word = 0; word < kSpoiltWords; ++word) {
    for (uint32_t left = tokens[word]; left != 0; left &= left - 1) scores[32 * word + __builtin_ctz(left)] = __builtin_nanf("");
  }
}

void score_task(const CodedKeyScoresArguments& a, int entry, int head, int task, Workers& workers, int worker) {
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  const int blocks = a.key_counts[cache_head] / kCodedBlockTokens;
  const int first = task * kTaskBlocks;
  const int end = first + kTaskBlocks < blocks ? first + kTaskBlocks : blocks;
  const Columns columns(a, entry, head);
  if (first >= end || columns.count() == 0) return;
  const int32_t* table = a.block_table + cache_head * a.table_width;
  const int64_t stride = columns.floats();
  auto* queries = static_cast<float*>(workers.scratch(worker, static_cast<size_t>(kMostColumns * stride) * sizeof(float)));
  for (int column = 0; column < columns.count(); column += kMostColumns) {
    const int count = columns.count() - column < kMostColumns ? columns.count() - column : kMostColumns;
    float* scores[kMostColumns] = {};
    for (int c = 0; c < count; ++c) {
      with_float_type(a.query_dtype, [&](auto element) {
        columns.arrange(a, head, column + c, static_cast<const decltype(element)*>(a.query), queries + c * stride);
      });
      scores[c] = columns.scores(a, column + c) + int64_t{first} * kCodedBlockTokens;
    }
    for (int number = first; number < end; ++number) {
      const uint32_t* block = a.coded.block(table[number]);
      const auto score = count == 4   ? score_columns<4>
                         : count == 3 ? score_columns<3>
                         : count == 2 ? score_columns<2>
                                      : score_columns<1>;
      score(a, head, block, queries, stride, scores);
      for (int c = 0; c < count; ++c) {
        spoil(a.coded.spoilt(table[number]), scores[c]);
        scores[c] += kCodedBlockTokens;
      }
    }
  }
}

}  // namespace

void coded_key_scores(const CodedKeyScoresArguments& a, Workers& workers) {
  int32_t longest = 0;
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    if (a.query_start[entry] == a.query_start[entry + 1]) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int32_t count = a.key_counts[int64_t{a.slots[entry]} * a.kv_heads + head];
      if (count > longest) longest = count;
    }
  }
  const int tasks = (longest / kCodedBlockTokens + kTaskBlocks - 1) / kTaskBlocks;
  if (tasks == 0) return;
  const int heads = a.kv_heads;
  workers.for_each(static_cast<size_t>(a.batch) * heads * tasks, [&](size_t index, int worker) {
    const int entry = static_cast<int>(index / (static_cast<size_t>(heads) * tasks));
    if (a.query_start[entry] == a.query_start[entry + 1]) return;
    score_task(a, entry, static_cast<int>(index / tasks % heads), static_cast<int>(index % tasks), workers, worker);
  });
}

}  // namespace KV_ISA
}  // namespace kv
