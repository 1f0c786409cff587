#include "kernels/coded-key-scores/coded-key-scores.h"

#include "kernels/coded-key-scores/coded-key-scores-pairs.cpu.h"
#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kTaskBlocks = 16;  // of one kv head of one batch entry, or more where ranges have fewer parts
constexpr int kMostColumns = 4;  // rows and heads that are scored at once

// A vector of sums has two lanes for a token, of the even and of the odd dims.
constexpr int kStepVectors = kStepTokens / kPairTokens;

// Adds the products of two neighbouring dims of a step's tokens and those of the queries, from `query` on.
template <int kColumns>
__attribute__((always_inline)) inline void add_pairs(const Pairs (&pairs)[kStepVectors], const float* query, int64_t stride,
                                                     Vec (&sums)[kColumns][kStepVectors]) {
  typedef int64_t VecLong __attribute__((vector_size(kLanes * 4)));
  Vec numbers[kStepVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kStepVectors; ++v) numbers[v] = numbers_of(pairs[v]);
#pragma GCC unroll 4
  for (int c = 0; c < kColumns; ++c) {
    int64_t both;
    std::memcpy(&both, query + c * stride, sizeof both);
    const Vec dims = reinterpret_cast<Vec>(both - VecLong{});
#pragma GCC unroll 4
    for (int v = 0; v < kStepVectors; ++v) sums[c][v] += numbers[v] * dims;
  }
}

// The same of all dims of a group. kSubDim is the number of dims of a sub-vector, or 0 for any.
template <int kSubDim, int kColumns>
__attribute__((always_inline)) inline void add_group(const uint8_t* book, const int32_t* places, int sub_dim, const float* query,
                                                     int64_t stride, Vec (&sums)[kColumns][kStepVectors]) {
  Pairs pairs[kStepVectors];
  if constexpr (kSubDim == 2) {
#pragma GCC unroll 4
    for (int v = 0; v < kStepVectors; ++v) pairs[v] = load_twos(book, places + v * kPairTokens);
    add_pairs(pairs, query, stride, sums);
  } else if constexpr (kSubDim == 4) {
    Pairs others[kStepVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kStepVectors; ++v) {
      const TwoPairs both = load_fours(book, places + v * kPairTokens);
      pairs[v] = both.first;
      others[v] = both.second;
    }
    add_pairs(pairs, query, stride, sums);
    add_pairs(others, query + 2, stride, sums);
  } else {
    for (int d = 0; d < sub_dim; d += 2) {
#pragma GCC unroll 4
      for (int v = 0; v < kStepVectors; ++v) pairs[v] = load_any(book, places + v * kPairTokens, d, sub_dim);
      add_pairs(pairs, query + d, stride, sums);
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

  template <int kSubDim, int kColumns>
  void compute() const {
    const int groups = coded.groups();
    const int sub_dim = kSubDim == 0 ? coded.sub_dim : kSubDim;
    const int64_t between_books = coded.books == 1 ? 0 : coded.book_elements();
    for (int token = 0; token < kCodedBlockTokens; token += kStepTokens) {
      StepPlaces places;
      Vec sums[kColumns][kStepVectors] = {};
      for (int chunk = 0; chunk < coded_chunks(groups); ++chunk) {
        const Fetch fetch(*this, chunk, token);
        unpack<kSubDim>(coded, block, chunk, token, places);
        const int first = chunk * kChunkGroups;
        const int count = groups - first < kChunkGroups ? groups - first : kChunkGroups;
        for (int i = 0; i < count; ++i) {
          fetch.part(i);
          const auto* book = reinterpret_cast<const uint8_t*>(books + (first + i) * between_books);
          add_group<kSubDim>(book, places[i], sub_dim, queries + (first + i) * sub_dim, stride, sums);
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) write(sums[c], scores[c] + token);
    }
  }

 private:
  // Fetches as large a part of the next block's chunk as is scored of this one from `token` on, with each group a little:
  // all at once would wait for each other.
  class Fetch {
   public:
    Fetch(const BlockScores& scores, int chunk, int token) {
      const CodedKeys& coded = scores.coded;
      const int64_t bytes = int64_t{4} * kChunkOctets * quads_of_chunk(coded.groups(), chunk) * coded.code_bits;
      from_ = reinterpret_cast<const char*>(scores.next + chunk_offset(chunk, coded.code_bits)) + bytes * token / kCodedBlockTokens;
      of_group_ = bytes * kStepTokens / kCodedBlockTokens / kChunkGroups;
    }

    void part(int group) const { __builtin_prefetch(from_ + group * of_group_, 0, 2); }

   private:
    const char* from_;
    int64_t of_group_;
  };

  __attribute__((always_inline)) void write(const Vec (&sums)[kStepVectors], float* to) const {
    VecInt even = {}, odd = {};
    for (int i = 0; i < kLanes; ++i) {
      even[i] = 2 * i;
      odd[i] = 2 * i + 1;
    }
#pragma GCC unroll 4
    for (int v = 0; v < kStepVectors; v += 2) {
      store(to + v * kPairTokens, (permute(sums[v], sums[v + 1], even) + permute(sums[v], sums[v + 1], odd)) * scale);
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

  float* ranges(const CodedKeyScoresArguments& a, int entry, int head, int column) const {
    return a.ranges_of(a.query_start[entry] + column / group_, head * group_ + column % group_);
  }

 private:
  int group_;
  int count_;
  int64_t first_query_ = 0;
  float* first_score_ = nullptr;
};

using ScoreBlock = void (BlockScores::*)() const;

template <int kSubDim>
ScoreBlock of_columns(int columns) {
  if (columns == 4) return &BlockScores::compute<kSubDim, 4>;
  if (columns == 3) return &BlockScores::compute<kSubDim, 3>;
  return columns == 2 ? &BlockScores::compute<kSubDim, 2> : &BlockScores::compute<kSubDim, 1>;
}

ScoreBlock score_block(int sub_dim, int columns) {
  if (sub_dim == 2) return of_columns<2>(columns);
  return sub_dim == 4 ? of_columns<4>(columns) : of_columns<0>(columns);
}

// Scores with spoilt tokens are NaN.
void spoil(const uint32_t* tokens, float* scores) {
  for (int word = 0; word < kSpoiltWords; ++word) {
    for (uint32_t left = tokens[word]; left != 0; left &= left - 1) scores[32 * word + __builtin_ctz(left)] = __builtin_nanf("");
  }
}

// The least and the largest of so many scores, a multiple of kLanes.
void write_range(const float* scores, int count, float* range) {
  Vec least = splat(__builtin_inff());
  Vec most = splat(-__builtin_inff());
  VecInt odd = {};
  for (int i = 0; i < count; i += kLanes) {
    const Vec own = load(scores + i);
    least = -maximum(-least, -own);
    most = maximum(most, own);
    odd |= own != own;
  }
  range[0] = -horizontal_maximum(-least);
  range[1] = horizontal_maximum(most);
  for (int lane = 0; lane < kLanes; ++lane) range[1] = odd[lane] != 0 ? __builtin_nanf("") : range[1];
}

struct Tasks {
  int blocks;  // of each
  int count;   // of each entry and kv head
};

void score_task(const CodedKeyScoresArguments& a, int entry, int head, const Tasks& tasks, int task, Workers& workers, int worker) {
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  const int blocks = a.key_counts[cache_head] / kCodedBlockTokens;
  const int first = task * tasks.blocks;
  const int end = first + tasks.blocks < blocks ? first + tasks.blocks : blocks;
  const Columns columns(a, entry, head);
  if (a.ranges != nullptr) {
    for (int column = 0; column < columns.count(); ++column) {
      float* ranges = columns.ranges(a, entry, head, column);
      for (int part = task; part < a.range_parts; part += tasks.count) {
        ranges[2 * part] = __builtin_inff();
        ranges[2 * part + 1] = -__builtin_inff();
      }
    }
  }
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
    const ScoreBlock score = score_block(a.coded.sub_dim, count);
    for (int number = first; number < end; ++number) {
      const uint32_t* block = a.coded.block(table[number]);
      const uint32_t* next = a.coded.block(table[number + 1 < end ? number + 1 : first]);
      const uint16_t* books = a.coded.centroids + a.coded.book_offset(head, 0);
      (BlockScores{a.coded, books, block, next, queries, stride, scores, a.scale}.*score)();
      for (int c = 0; c < count; ++c) {
        spoil(a.coded.spoilt(table[number]), scores[c]);
        scores[c] += kCodedBlockTokens;
      }
    }
    if (a.ranges == nullptr) continue;
    const int tokens = (end - first) * kCodedBlockTokens;
    for (int c = 0; c < count; ++c) write_range(scores[c] - tokens, tokens, columns.ranges(a, entry, head, column + c) + 2 * task);
  }
}

}  // namespace

void coded_key_scores(const CodedKeyScoresArguments& a, Workers& workers) {
  const int blocks = most_keys(a) / kCodedBlockTokens;
  Tasks tasks{kTaskBlocks, 1};
  if (a.ranges != nullptr && int64_t{kTaskBlocks} * a.range_parts < blocks) tasks.blocks = (blocks + a.range_parts - 1) / a.range_parts;
  tasks.count = (blocks + tasks.blocks - 1) / tasks.blocks;
  if (a.ranges != nullptr && tasks.count == 0) tasks.count = 1;
  if (tasks.count == 0) return;
  const int heads = a.kv_heads;
  workers.for_each(static_cast<size_t>(a.batch) * heads * tasks.count, [&](size_t index, int worker) {
    const int entry = static_cast<int>(index / (static_cast<size_t>(heads) * tasks.count));
    if (a.query_start[entry] == a.query_start[entry + 1]) return;
    score_task(a, entry, static_cast<int>(index / tasks.count % heads), tasks, static_cast<int>(index % tasks.count), workers, worker);
  });
}

}  // namespace KV_ISA
}  // namespace kv
