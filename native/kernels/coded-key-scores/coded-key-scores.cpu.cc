#include "kernels/coded-key-scores/coded-key-scores.h"

#include "runtime/workers.h"
#include "shared/coded-keys/coded-keys.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// A vector of codes has a lane for each stream of neighbouring octets: lane 4 * octet + quad. Those of 16 places of a tile
// are the codes of four tokens of each octet.
constexpr int kOctets = kLanes / 4;
constexpr int kPlaces = kStreamCodes / 2;

constexpr int kTaskBlocks = 16;  // of one kv head of one batch entry
constexpr int kMostColumns = 4;  // rows and heads that are scored at once

// Where the sub-vectors of a tile's codes lie in their book, in bytes.
typedef uint32_t PlaceTable[kPlaces][kLanes];

// The words of `kOctets` octets of a chunk, from `words` on. A chunk with fewer than four quads lends the last one to all
// others.
VecInt load_words(const uint32_t* words, int quads) {
  VecInt v;
  if (quads == 4) {
    std::memcpy(&v, words, sizeof v);
  } else {
    for (int i = 0; i < kLanes; ++i) v[i] = static_cast<int32_t>(words[i / 4 * quads + (i % 4 < quads ? i % 4 : quads - 1)]);
  }
  return v;
}

// Unpacks the codes of a tile of a chunk, of which `words` are those from an octet on. A code beyond `most_code` counts as
// that. kBits and kQuads are those of the chunk, or 0 for any: known beforehand, they settle every shift.
template <int kBits, int kQuads, int kTile>
void unpack_tile(const uint32_t* words, int any_bits, int any_quads, int most_code, int centroid_bytes, PlaceTable& places) {
  typedef uint32_t VecWord __attribute__((vector_size(kLanes * 4)));
  const int bits = kBits == 0 ? any_bits : kBits;
  const int quads = kQuads == 0 ? any_quads : kQuads;
#pragma GCC unroll 16
  for (int place = 0; place < kPlaces; ++place) {
    const int bit = (kPlaces * kTile + place) * bits;
    const int shift = bit % 32;
    const uint32_t* word = words + bit / 32 * kChunkOctets * quads;
    VecWord v = reinterpret_cast<VecWord>(load_words(word, quads)) >> shift;
    if (shift + bits > 32) v |= reinterpret_cast<VecWord>(load_words(word + kChunkOctets * quads, quads)) << (32 - shift);
    const VecInt code = reinterpret_cast<VecInt>(v) & ((1 << bits) - 1);
    const VecInt bytes = (code < most_code ? code : most_code - VecInt{}) * centroid_bytes;
    std::memcpy(places[place], &bytes, sizeof bytes);
  }
}

void unpack(const CodedKeys& coded, int sub_dim, const uint32_t* block, int number, int tile, int octet, PlaceTable& places) {
  const int bits = coded.code_bits;
  const int quads = quads_of_chunk(coded.groups(), number);
  const uint32_t* words = block + chunk_offset(number, bits) + octet * quads;
  const bool is_common = quads == 4 && bits == 13;  // 8192 centroids
  const auto unpack = is_common ? (tile == 0 ? unpack_tile<13, 4, 0> : unpack_tile<13, 4, 1>)
                                : (tile == 0 ? unpack_tile<0, 0, 0> : unpack_tile<0, 0, 1>);
  unpack(words, bits, quads, coded.centroid_count - 1, 2 * sub_dim, places);
}

// Finite f16 numbers in the high and in the low half of each lane. The sign stays, and the factor moves the exponent,
// that of numbers without a leading one too.
inline Vec high_half(VecInt pair) {
  return reinterpret_cast<Vec>(pair >> 3 & static_cast<int32_t>(0x8fffe000)) * 0x1p112f;
}
inline Vec low_half(VecInt pair) { return high_half(pair << 16); }

// Where the sub-vectors of a group lie in its book. Token 4 * octet + t is the t-th of an octet.
struct GroupPlaces {
  const uint8_t* book;
  const uint32_t* bytes;

  const uint8_t* operator()(int octet, int t) const { return book + bytes[t * kQuadGroups * kLanes + octet * 4]; }
};

typedef int32_t Quad __attribute__((vector_size(16)));

// Two neighbouring dims of the sub-vectors of an octet's four tokens. On AVX-512 each is one instruction.
Quad load_fours(const GroupPlaces& at, int octet) {
#if defined(__AVX512F__)
  const auto load = [&](int t) { return _mm_loadu_si32(at(octet, t)); };
  __m128i v = _mm_mask_broadcastd_epi32(_mm_broadcastd_epi32(load(0)), 2, load(1));
  v = _mm_mask_broadcastd_epi32(v, 4, load(2));
  return reinterpret_cast<Quad>(_mm_mask_broadcastd_epi32(v, 8, load(3)));
#else
  Quad v;
  for (int t = 0; t < 4; ++t) {
    int32_t pair;
    std::memcpy(&pair, at(octet, t), 4);
    v[t] = pair;
  }
  return v;
#endif
}

// Four dims of two of them, from `t` on.
Quad load_eights(const GroupPlaces& at, int octet, int t) {
#if defined(__AVX512F__)
  const auto load = [&](int i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(octet, t + i))); };
  return reinterpret_cast<Quad>(_mm_mask_broadcastq_epi64(load(0), 2, load(1)));
#else
  typedef int64_t Pair __attribute__((vector_size(16)));
  int64_t first, second;
  std::memcpy(&first, at(octet, t), 8);
  std::memcpy(&second, at(octet, t + 1), 8);
  return reinterpret_cast<Quad>(Pair{first, second});
#endif
}

VecInt join(const Quad (&quads)[kOctets]) {
#if defined(__AVX512F__)
  const auto at = [&](int i) { return reinterpret_cast<__m128i>(quads[i]); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(at(2)), at(3), 1);
  return reinterpret_cast<VecInt>(_mm512_maskz_inserti64x4(0xff, _mm512_castsi256_si512(low), high, 1));
#elif defined(__AVX2__)
  const auto at = [&](int i) { return reinterpret_cast<__m128i>(quads[i]); };
  return reinterpret_cast<VecInt>(_mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1));
#else
  return quads[0];
#endif
}

template <int kColumns>
void add_pairs(VecInt pairs, const float* query, int64_t stride, Vec (&sums)[kColumns][2]) {
  const Vec low = low_half(pairs), high = high_half(pairs);
#pragma GCC unroll 4
  for (int c = 0; c < kColumns; ++c) {
    sums[c][0] += low * query[c * stride];
    sums[c][1] += high * query[c * stride + 1];
  }
}

// Adds the products of kLanes tokens' sub-vectors in a group and the queries' dims from `query` on. kSubDim is the number
// of dims of a sub-vector, or 0 for any.
template <int kSubDim, int kColumns>
void add_group(const GroupPlaces& at, int sub_dim, const float* query, int64_t stride, Vec (&sums)[kColumns][2]) {
  if constexpr (kSubDim == 2) {
    Quad quads[kOctets];
#pragma GCC unroll 4
    for (int octet = 0; octet < kOctets; ++octet) quads[octet] = load_fours(at, octet);
    add_pairs(join(quads), query, stride, sums);
  } else if constexpr (kSubDim == 4) {
    Quad quads[2 * kOctets];
    VecInt even = {}, odd = {};
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kOctets; ++i) quads[i] = load_eights(at, i / 2, i % 2 * 2);
    for (int i = 0; i < kLanes; ++i) {
      even[i] = 2 * i;
      odd[i] = 2 * i + 1;
    }
    Quad halves[2][kOctets];
    std::memcpy(halves, quads, sizeof quads);
    const Vec a = reinterpret_cast<Vec>(join(halves[0])), b = reinterpret_cast<Vec>(join(halves[1]));
    add_pairs(reinterpret_cast<VecInt>(permute(a, b, even)), query, stride, sums);
    add_pairs(reinterpret_cast<VecInt>(permute(a, b, odd)), query + 2, stride, sums);
  } else {
    for (int d = 0; d < sub_dim; d += 2) {
      int32_t pairs[kLanes] = {};
      const size_t bytes = d + 1 < sub_dim ? 4 : 2;  // an odd last dim stands beside a 0
      for (int token = 0; token < kLanes; ++token) std::memcpy(pairs + token, at(token / 4, token % 4) + 2 * d, bytes);
      VecInt v;
      std::memcpy(&v, pairs, sizeof v);
      add_pairs(v, query + d, stride, sums);
    }
  }
}

// A block of coded keys of a kv head, and the queries that are scored with it.
struct BlockScores {
  const CodedKeys& coded;
  const uint16_t* books;
  const uint32_t* block;
  const uint32_t* next;  // the block that will be read after it
  const float* queries;  // `stride` floats apart
  int64_t stride;
  float* const* scores;  // of each column and the block's tokens
  float scale;

  template <int kColumns, int kSubDim>
  void compute() const {
    const int sub_dim = kSubDim == 0 ? coded.sub_dim : kSubDim;
    const int64_t between_books = coded.books == 1 ? 0 : coded.book_elements();
    for (int token = 0; token < kCodedBlockTokens; token += kLanes) {
      PlaceTable places;
      Vec sums[kColumns][2] = {};
      for (int group = 0; group < coded.groups(); ++group) {
        if (group % kChunkGroups == 0) {
          const int number = group / kChunkGroups;
          // As large a part of the next block's chunk as is unpacked of this one.
          const int64_t words = chunk_words(number) * kLanes / kCodedBlockTokens;
          const uint32_t* line = next + chunk_offset(number, coded.code_bits) + words * token / kLanes;
          for (int64_t i = 0; i < words; i += 16) __builtin_prefetch(line + i, 0, 2);
          unpack(coded, sub_dim, block, number, token / 32, token % 32 / 4, places);
        }
        const GroupPlaces at{reinterpret_cast<const uint8_t*>(books + group * between_books),
                             places[group % kQuadGroups] + group / kQuadGroups % kQuadGroups};
        add_group<kSubDim>(at, sub_dim, queries + group * sub_dim, stride, sums);
      }
      for (int c = 0; c < kColumns; ++c) store(scores[c] + token, (sums[c][0] + sums[c][1]) * scale);
    }
  }

 private:
  int64_t chunk_words(int number) const {
    return int64_t{kChunkOctets} * quads_of_chunk(coded.groups(), number) * coded.code_bits;
  }
};

// The queries of one kv head of one batch entry. Column r * group + h is row r, and query head h of the group.
class Columns {
 public:
  Columns(const CodedKeyScoresArguments& a, int entry, int head)
      : group_(a.query_heads / a.kv_heads), count_((a.query_start[entry + 1] - a.query_start[entry]) * group_) {
    const int64_t token = a.query_start[entry];
    first_query_ = token * a.query_token_stride + int64_t{head} * group_ * a.query_head_stride;
    first_score_ = a.scores + token * a.score_token_stride + int64_t{head} * group_ * a.score_head_stride;
  }

  int count() const { return count_; }

  template <class T>
  void load(const CodedKeyScoresArguments& a, int head, int column, const T* queries, float* to) const {
    const T* from = queries + first_query_ + column / group_ * a.query_token_stride + column % group_ * a.query_head_stride;
    const float* scales = a.coded.channel_scale == nullptr ? nullptr : a.coded.channel_scale + int64_t{head} * a.head_dim;
    for (int d = 0; d < a.head_dim; ++d) to[d] = to_float(from[d]) * (scales == nullptr ? 1.0f : scales[d]);
  }

  float* scores(const CodedKeyScoresArguments& a, int column) const {
    return first_score_ + column / group_ * a.score_token_stride + column % group_ * a.score_head_stride;
  }

 private:
  int group_;
  int count_;
  int64_t first_query_ = 0;
  float* first_score_ = nullptr;
};

template <int kColumns>
void score_columns(const BlockScores& block) {
  if (block.coded.sub_dim == 2) return block.compute<kColumns, 2>();
  if (block.coded.sub_dim == 4) return block.compute<kColumns, 4>();
  block.compute<kColumns, 0>();
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
  const int64_t stride = a.head_dim + 1;  // a pair of an odd last dim has a second number
  const size_t query_bytes = static_cast<size_t>(kMostColumns * stride) * sizeof(float);
  auto* queries = static_cast<float*>(workers.scratch(worker, query_bytes));
  std::memset(queries, 0, query_bytes);
  float* scores[kMostColumns] = {};
  for (int column = 0; column < columns.count(); column += kMostColumns) {
    const int count = columns.count() - column < kMostColumns ? columns.count() - column : kMostColumns;
    for (int c = 0; c < count; ++c) {
      with_float_type(a.query_dtype, [&](auto element) {
        columns.load(a, head, column + c, static_cast<const decltype(element)*>(a.query), queries + c * stride);
      });
      scores[c] = columns.scores(a, column + c) + int64_t{first} * kCodedBlockTokens;
    }
    const auto score = count == 4 ? score_columns<4> : count == 3 ? score_columns<3> : count == 2 ? score_columns<2> : score_columns<1>;
    for (int number = first; number < end; ++number) {
      const uint32_t* block = a.coded.block(table[number]);
      const uint32_t* next = a.coded.block(table[number + 1 < end ? number + 1 : first]);
      score({a.coded, a.coded.centroids + a.coded.book_offset(head, 0), block, next, queries, stride, scores, a.scale});
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
