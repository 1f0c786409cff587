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

// Where the centroids of a tile's codes lie in their book, in bytes.
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

// Pairs of neighbouring dims of the sub-vectors of kLanes tokens in a group: pairs[pair][token]. kSubDim is that of the
// book, or 0 for any. Of an odd last dim the pair's high half is 0.
template <int kSubDim>
void look_up(const uint16_t* book, int sub_dim, const PlaceTable& places, int group, uint32_t* pairs) {
  const uint32_t* of_group = places[group % kQuadGroups] + group / kQuadGroups % kQuadGroups;
  const auto* bytes = reinterpret_cast<const uint8_t*>(book);
#pragma GCC unroll 16
  for (int token = 0; token < kLanes; ++token) {
    const uint8_t* centroid = bytes + of_group[token % 4 * kQuadGroups * kLanes + token / 4 * 4];
    if constexpr (kSubDim == 2 || kSubDim == 4) {
      std::memcpy(pairs + token * (kSubDim / 2), centroid, 2 * kSubDim);
    } else {
      for (int d = 0; d < sub_dim; d += 2) {
        uint32_t pair = 0;
        std::memcpy(&pair, centroid + 2 * d, d + 1 < sub_dim ? 4 : 2);
        pairs[d / 2 * kLanes + token] = pair;
      }
    }
  }
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

// Adds the products of a group's sub-vectors, that look_up wrote, and the queries' dims from `query` on.
template <int kSubDim, int kColumns>
void add_group(const uint32_t* pairs, int sub_dim, const float* query, int64_t stride, Vec (&sums)[kColumns][2]) {
  const auto load_at = [&](int vector) {
    VecInt v;
    std::memcpy(&v, pairs + vector * kLanes, sizeof v);
    return v;
  };
  if constexpr (kSubDim == 4) {
    VecInt even = {}, odd = {};
    for (int i = 0; i < kLanes; ++i) {
      even[i] = 2 * i;
      odd[i] = 2 * i + 1;
    }
    const Vec a = reinterpret_cast<Vec>(load_at(0)), b = reinterpret_cast<Vec>(load_at(1));
    add_pairs(reinterpret_cast<VecInt>(permute(a, b, even)), query, stride, sums);
    add_pairs(reinterpret_cast<VecInt>(permute(a, b, odd)), query + 2, stride, sums);
  } else {
    for (int d = 0; d < sub_dim; d += 2) add_pairs(load_at(d / 2), query + d, stride, sums);
  }
}

// A block of coded keys of a kv head, and the queries that are scored with it.
struct BlockScores {
  const CodedKeys& coded;
  const uint16_t* books;
  const uint32_t* block;
  const float* queries;  // `stride` floats apart
  int64_t stride;
  float* const* scores;  // of each column and the block's tokens
  float scale;
  uint32_t* pairs;  // room for kLanes keys

  // A group is added some groups after its sub-vectors were looked up: looking up only loads and stores, and a vector is
  // loaded only when its parts have left the queue of stores.
  template <int kColumns, int kSubDim>
  void compute() const {
    constexpr int kLag = 8;
    const int sub_dim = kSubDim == 0 ? coded.sub_dim : kSubDim;
    const int of_group = (sub_dim + 1) / 2 * kLanes;
    const int groups = coded.groups();
    const int64_t between_books = coded.books == 1 ? 0 : coded.book_elements();
    for (int token = 0; token < kCodedBlockTokens; token += kLanes) {
      PlaceTable places;
      Vec sums[kColumns][2] = {};
      for (int group = 0; group < groups + kLag; ++group) {
        if (group < groups) {
          if (group % kChunkGroups == 0) unpack(coded, sub_dim, block, group / kChunkGroups, token / 32, token % 32 / 4, places);
          look_up<kSubDim>(books + group * between_books, sub_dim, places, group, pairs + group * of_group);
        }
        if (group < kLag) continue;
        const int added = group - kLag;
        add_group<kSubDim>(pairs + added * of_group, sub_dim, queries + added * sub_dim, stride, sums);
      }
      for (int c = 0; c < kColumns; ++c) store(scores[c] + token, (sums[c][0] + sums[c][1]) * scale);
    }
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
  const int64_t pairs = int64_t{a.coded.groups()} * ((a.coded.sub_dim + 1) / 2) * kLanes;
  auto* queries = static_cast<float*>(workers.scratch(worker, static_cast<size_t>(kMostColumns * stride + pairs) * sizeof(float)));
  std::memset(queries, 0, static_cast<size_t>(kMostColumns * stride) * sizeof(float));
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
      score({a.coded, a.coded.centroids + a.coded.book_offset(head, 0), block, queries, stride, scores, a.scale,
             reinterpret_cast<uint32_t*>(queries + kMostColumns * stride)});
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
