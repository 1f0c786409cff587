// Multiplies a few query rows by a run: keys or values that are contiguous in memory. The lanes of a vector are
// dimensions. Each vector of the cache is converted once for all query rows.
#pragma once

#include "shared/attention/decode/lane-sums.cpu.h"
#if defined(__AVX512F__)
#include "shared/attention/decode/key-pairs.cpu.h"
#endif

namespace kv {
namespace KV_ISA {

// Query rows that share one pass over a run.
constexpr int kRowGroup = 4;
// Keys whose dot products are computed together, so that they do not wait for each other.
constexpr int kKeyGroup = 4;
// Vectors of a row's output that stay in registers. With kRowGroup rows they take 16 of 32 registers, or 8 of 16.
template <int kRows>
constexpr int kValueVectors = kLanes == 16 || kRows < 3 ? 4 : 2;

// The rows `bytes` ahead of those of a run: the first of them lie in the run, the others in the next one.
template <class T>
struct RowsAhead {
  const T* in_run = nullptr;
  const T* in_next = nullptr;
  int first_in_next = 0;

  RowsAhead() = default;
  RowsAhead(const T* rows, const T* next, int64_t stride, int count, int64_t bytes) {
    const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(T));
    const int ahead = bytes > row_bytes ? static_cast<int>(bytes / row_bytes) : 1;
    first_in_next = count - ahead;
    in_run = rows + ahead * stride;
    in_next = next - first_in_next * stride;
  }
  const T* of(int row, int64_t stride) const { return (row < first_in_next ? in_run : in_next) + row * stride; }
};

// `rows` of the cache, `stride` elements apart. Memory that will be read later is asked for with each row in use, which keeps the
// memory busy while the run is computed: a row of `next`, in cache kCache of the core. Where asks_nearby, it is a row of
// `for_second_cache` and a nearer one of `for_first_cache`.
template <class T, int kCache = 1>
struct Run {
  typedef T Element;

  const T* rows;
  const T* next;
  int64_t stride;
  int count;
  bool again = false;  // whether the core drops requests for its second cache
  int dim = 0;
  RowsAhead<T> for_second_cache{}, for_first_cache{};

  const T* row(int index) const { return rows + index * stride; }
  // The dims d .. d + kLanes - 1 of a row.
  Vec at(int index, int d) const { return load(row(index) + d); }

  // Whether rows shortly ahead are asked for, in both caches. With AVX2 the code would be too large for what it gains.
  static bool asks_nearby(bool again) { return kCache == 2 && kLanes == 16 && !again; }

  // What is asked for with a row: another one, and with asks_nearby a nearer one, too.
  struct Ahead {
    const T* row;
    const T* nearer;
  };
  __attribute__((always_inline)) Ahead ahead_of(int row) const {
    if (asks_nearby(again)) return {for_second_cache.of(row, stride), for_first_cache.of(row, stride)};
    return {next + row * stride, nullptr};
  }
  // Asks for what is `on` rows further than `ahead`, for kRows query rows: one leaves the core time to ask four times, two leave
  // time for three. GCC leaves out calls of a function that only asks for memory, unless it is inlined before it is looked at.
  template <int kRows>
  __attribute__((always_inline)) void fetch(Ahead ahead, int on, int first, int elements) const {
    constexpr int kLineElements = 64 / sizeof(T);
    if (asks_nearby(again)) {
      if (first > 0) return;
      for (int d = 0; d < elements; d += 2 * kLineElements) {
        __builtin_prefetch(ahead.row + on * stride + d, 0, 2);
        __builtin_prefetch(ahead.row + on * stride + d + kLineElements, 0, 2);
        __builtin_prefetch(ahead.nearer + on * stride + d, 0, 3);
        __builtin_prefetch(ahead.nearer + on * stride + d + kLineElements, 0, 3);
      }
      return;
    }
    const int requests = kCache == 2 && kRows <= 2 && again ? 5 - kRows : 1;
#pragma GCC unroll 8
    for (int d = first; d < first + elements; d += kLineElements) {
      for (int i = 0; i < requests; ++i) __builtin_prefetch(ahead.row + on * stride + d, 0, kCache == 1 ? 3 : 2);
    }
  }
  template <int kRows>
  __attribute__((always_inline)) void fetch_next(int row, int first, int elements) const {
    // All of a row at once, so that memory is asked for in its order.
    fetch<kRows>(ahead_of(row), 0, first, asks_nearby(again) && elements < dim ? dim : elements);
  }
};

// scores[row * score_stride + k] = the sum over the lanes of totals[row][k].
template <int kRows, int kKeys>
__attribute__((always_inline)) inline void store_sums(const Vec (&totals)[kRows][kKeys], float* scores,
                                                      int64_t score_stride) {
  constexpr int kRowsAtOnce = kKeyGroup / kKeys;
#pragma GCC unroll 4
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    const Vec* first = totals[row];
    const Vec* last = totals[row + kRowsAtOnce <= kRows ? row + kRowsAtOnce - 1 : row];
    const Quad sums = horizontal_sums(first[0], first[1], last[kKeys - 2], last[kKeys - 1]);
    float parts[kKeyGroup];
    std::memcpy(parts, &sums, sizeof sums);
    std::memcpy(scores + row * score_stride, parts, kKeys * sizeof(float));
    if (last != first) std::memcpy(scores + (row + 1) * score_stride, parts + kKeys, kKeys * sizeof(float));
  }
}

// scores[row * score_stride + key] = queries[row] . keys[key] for kRows rows and all keys of a run, with one key in a vector.
// Query rows are `dim` floats apart; `dim` is kDim, or any multiple of kLanes where kDim is 0. Up to kKeyGroup - 1 further
// scores are written. Inlined into its callers, it would find no registers.
template <int kRows, int kDim, class Keys>
__attribute__((noinline)) void score_dims(const float* queries, const Keys& keys, int any_dim, float* scores,
                                          int64_t score_stride) {
  const int dim = kDim > 0 ? kDim : any_dim;
  // With 16 registers, the sums of four rows and four keys would leave none for operands.
  constexpr int kKeys = kLanes < 16 && kRows > 2 ? 2 : kKeyGroup;
  for (int key = 0; key < keys.count; key += kKeys) {
    int group[kKeys];
#pragma GCC unroll 4
    for (int k = 0; k < kKeys; ++k) {
      group[k] = key + k < keys.count ? key + k : keys.count - 1;
      keys.template fetch_next<kRows>(key + k, 0, dim);
    }
    Vec totals[kRows][kKeys] = {};
    const auto add_products = [&](int d) __attribute__((always_inline)) {
      Vec loaded[kKeys];
#pragma GCC unroll 4
      for (int k = 0; k < kKeys; ++k) loaded[k] = keys.at(group[k], d);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        Vec query = load(queries + row * dim + d);
        if (kKeys < kKeyGroup) asm("" : "+x"(query));  // without this, the query is loaded once for each key
#pragma GCC unroll 4
        for (int k = 0; k < kKeys; ++k) totals[row][k] += query * loaded[k];
      }
    };
    if constexpr (kDim > 0) {
#pragma GCC unroll 8
      for (int d = 0; d < kDim; d += kLanes) add_products(d);
    } else {
      for (int d = 0; d < dim; d += kLanes) add_products(d);
    }
    store_sums(totals, scores + key, score_stride);
  }
}

// scores[row * score_stride + key] = queries[row] . keys[key] for kRows rows and all keys of a run. Query rows are `dim` floats
// apart, a multiple of kLanes. Up to kKeyGroup - 1 further scores are written.
template <int kRows, class Keys>
inline void score_run(const float* queries, const Keys& keys, int dim, float* scores, int64_t score_stride) {
  // Of the short vectors of the baseline, straight code would be long.
  if constexpr (kLanes >= 8) {
    if (dim == 64) return score_dims<kRows, 64>(queries, keys, dim, scores, score_stride);
    if (dim == 128) return score_dims<kRows, 128>(queries, keys, dim, scores, score_stride);
  }
  score_dims<kRows, 0>(queries, keys, dim, scores, score_stride);
}

// Queries for score_run or, where they are spread, for score_pairs.
struct ScoringQueries {
  const float* rows;
  int dim;
  bool spread;
};

// The queries for keys of type T. `room` has room for twice their floats. For one or two query heads a kv head, and for long
// rows, sums over lanes are too few to be worth pairs. A query's result does not depend on how many rows there are.
template <class T>
inline ScoringQueries scoring_queries(const float* queries, int64_t rows, int dim, int64_t group, float* room) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    if (group > 2 && dim == kPairedDim) {
      spread_queries<T>(queries, rows * dim, room);
      return {room, dim, true};
    }
  }
#else
  (void)rows, (void)group, (void)room;
#endif
  return {queries, dim, false};
}

// The scores of the query rows from `first` on, as score_run writes them. Up to seven further scores are written.
template <int kRows, class Keys>
inline void score_prepared(const ScoringQueries& queries, int64_t first, const Keys& keys, float* scores, int64_t score_stride) {
#if defined(__AVX512F__)
  if constexpr (sizeof(typename Keys::Element) == 2) {
    if (queries.spread) return score_pairs<kRows>(queries.rows + 2 * first * kPairedDim, keys, scores, score_stride);
  }
#endif
  score_run<kRows>(queries.rows + first * queries.dim, keys, queries.dim, scores, score_stride);
}

// output[row, 0 .. kVectors * kLanes) += sum over keys of weights[row * weight_stride + key] * values[key], for the
// columns of `values` from `first` on.
template <int kRows, int kVectors, class Values>
inline void add_value_columns(const float* weights, int64_t weight_stride, const Values& values, int first,
                              float* output, int64_t output_stride) {
  Vec totals[kRows][kVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) totals[row][v] = load(output + row * output_stride + v * kLanes);
  }
  for (int key = 0; key < values.count; ++key) {
    values.template fetch_next<kRows>(key, first, kVectors * kLanes);
    Vec loaded[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      loaded[v] = values.at(key, first + v * kLanes);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Vec weight = splat(weights[row * weight_stride + key]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) totals[row][v] += weight * loaded[v];
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(output + row * output_stride + v * kLanes, totals[row][v]);
  }
}

// The same for all columns from `first` to `dim`, a multiple of kLanes. Output rows are `dim` floats apart.
template <int kRows, int kVectors = kValueVectors<kRows>, class Values>
inline void add_values(const float* weights, int64_t weight_stride, const Values& values, int dim, float* output,
                       int first = 0) {
  int d = first;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    add_value_columns<kRows, kVectors>(weights, weight_stride, values, d, output + d, dim);
  }
  if constexpr (kVectors > 1) {
    if (d < dim) add_values<kRows, kVectors / 2>(weights, weight_stride, values, dim, output, d);
  }
}

}  // namespace KV_ISA
}  // namespace kv
