// Decode attention over a cache of any kind. The keys are cut into splits of fixed length, which workers share. The
// partial results of the splits are then merged.
#pragma once

#include <math.h>

#include "runtime/workers.h"
#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/decode/key-run.cpu.h"
#include "shared/attention/part-weights.cpu.h"

namespace kv {
namespace KV_ISA {

// Keys of one split.
constexpr int kSplitKeys = 256;
// Distance between the scores of two rows: a run may write a few scores too many.
constexpr int kScoreStride = kSplitKeys + kLanes;
// Consecutive splits that a worker takes at a time. It is fewer if workers would then find fewer than kTasksPerWorker
// tasks each.
constexpr int64_t kTaskSplits = 8;
constexpr int64_t kTasksPerWorker = 8;
// The partial result of one row over one split: output[dim] = sum of exp(score - maximum) * value, and its
// statistics.
struct Partial {
  float* output;
  float* maximum;
  float* sum;
};

// Memory for the partial results of every row of every split, which the merge reads.
struct Partials {
  float* data;
  int64_t rows;  // the largest number of rows of a batch entry
  int dim;       // rounded up to kLanes

  static size_t bytes(int64_t splits, int64_t rows, int dim) {
    return static_cast<size_t>(splits * rows * (dim + 2)) * sizeof(float);
  }
  // The rows of a split are `dim` floats apart.
  Partial at(int64_t split, int64_t row) const {
    float* base = data + split * rows * (dim + 2);
    return {base + row * dim, base + rows * dim + row, base + rows * (dim + 1) + row};
  }
};

template <int kRows>
struct Rows {
  static constexpr int count = kRows;
};

template <class Body>
inline void with_rows(int64_t rows, Body&& body) {
  switch (rows) {
    case 1:
      return body(Rows<1>{});
    case 2:
      return body(Rows<2>{});
    case 3:
      return body(Rows<3>{});
    default:
      return body(Rows<kRowGroup>{});
  }
}

// The largest score of a row whose first `count` keys are seen. The others get a score that weighs nothing.
inline void find_maximum(float* scores, int32_t count, Partial partial) {
  for (int32_t key = count; key < kSplitKeys; ++key) scores[key] = -HUGE_VALF;
  Vec largest = splat(kLowestScore);
  for (int32_t key = 0; key < kSplitKeys; key += kLanes) largest = maximum(largest, load(scores + key));
  *partial.maximum = horizontal_maximum(largest);
}

// Turns a row's scores into weights relative to their maximum.
inline void weigh(float* scores, Partial partial) {
  const float peak = *partial.maximum;
  Vec sum = {};
  for (int32_t key = 0; key < kSplitKeys; key += kLanes) {
    const Vec weight = exponential(load(scores + key) - peak);
    store(scores + key, weight);
    sum += weight;
  }
  *partial.sum = horizontal_sum(sum);
}

// For a cache whose rows are read, and whose results are written, as they are.
struct PlainRows {
  static constexpr bool rotated = false;
  static constexpr bool merges = false;
  static int dim_of(int head_dim) { return static_cast<int>(divide_up(head_dim, kLanes)) * kLanes; }
};

template <class T>
inline void load_queries(const PagedAttentionArguments& a, const RowRange& range, int dim, float* queries) {
  for (int64_t row = 0; row < range.rows(); ++row) {
    const T* query = static_cast<const T*>(a.query) + range.token(row) * a.query_token_stride +
                     range.head(row) * a.query_head_stride;
    float* to = queries + row * dim;
    load_row(query, to, a.head_dim, dim);
    for (int d = 0; d < dim; d += kLanes) store(to + d, load(to + d) * a.scale);
  }
}

// The keys first .. end - 1 of a split, and the first key that the worker will read after them, as a rule.
struct SplitKeys {
  int32_t first;
  int32_t end;
  int32_t next;
  const RowRange& next_range;
};

// Calls body(first row, rows) for groups of up to kRowGroup rows. The number of rows is given as a type.
template <class Body>
inline void for_each_row_group(int64_t rows, Body&& body) {
  for (int64_t row = 0; row < rows; row += kRowGroup) {
    with_rows(rows - row, [&](auto group) { body(row, group); });
  }
}

template <class Cache>
inline void attend_split(const PagedAttentionArguments& a, const Cache& cache, const RowRange& range,
                         const SplitKeys& keys, const Partials& partials, int64_t split, float* rotated,
                         float* scratch) {
  const int dim = partials.dim;
  const int64_t rows = range.rows();
  float* queries = Cache::rotated ? rotated : scratch;
  float* scores = scratch + rows * dim;
  float* work = scores + rows * kScoreStride;
  if constexpr (!Cache::rotated) {
    with_float_type(a.query_dtype,
                    [&](auto element) { load_queries<decltype(element)>(a, range, dim, queries); });
  }
  cache.score(range, keys, queries, dim, scores, work);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t seen = range.visible(row) - keys.first;
    find_maximum(scores + row * kScoreStride, seen < 0 ? 0 : seen, partials.at(split, row));
  }
  for (int64_t row = 0; row < rows; ++row) weigh(scores + row * kScoreStride, partials.at(split, row));
  float* output = partials.at(split, 0).output;
  std::memset(output, 0, static_cast<size_t>(rows * dim) * sizeof(float));
  cache.add_values(range, keys, scores, dim, output, work);
}

// What the splits of a row sum to: sum of exp(score - peak).
struct RowSum {
  float peak;
  float sum;
};

// Merges all splits of a row: the sum of exp(score - peak) * value into its first split.
inline RowSum merge_splits(const Partials& partials, int64_t row, int64_t first_split, int64_t last_split) {
  float peak = kLowestScore;
  for (int64_t split = first_split; split < last_split; ++split) {
    const float largest = *partials.at(split, row).maximum;
    peak = largest > peak ? largest : peak;
  }
  float sum = 0;
  for (int64_t split = first_split; split < last_split; ++split) {
    const Partial partial = partials.at(split, row);
    const float weight = exponential(splat(*partial.maximum - peak))[0];
    sum += weight * *partial.sum;
    float* total = partials.at(first_split, row).output;
    for (int d = 0; d < partials.dim; d += kLanes) {
      const Vec before = split == first_split ? Vec{} : load(total + d);
      store(total + d, before + weight * load(partial.output + d));
    }
  }
  return {peak, sum};
}

// Merges all splits of a row and writes the result.
template <class T, class Cache>
inline void merge_row(const PagedAttentionArguments& a, const Cache& cache, const RowRange& range, int64_t row, const Partials& partials,
                      int64_t first_split, int64_t last_split) {
  T* output = static_cast<T*>(a.output) + range.token(row) * a.output_token_stride +
              range.head(row) * a.output_head_stride;
  const auto [peak, sum] = merge_splits(partials, row, first_split, last_split);
  const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
  if constexpr (Cache::rotated) {
    if (sum != 0) Cache::rotate_back(partials.at(first_split, row).output, a.head_dim);
  }
  const float* total = partials.at(first_split, row).output;
  float* log_sum_exp =
      a.log_sum_exp == nullptr ? nullptr : a.log_sum_exp + range.token(row) * a.query_heads + range.head(row);
  if (cache.merges) {
    if (sum == 0) return;
    const PartWeights weights = part_weights(*log_sum_exp, peak + logf(sum));
    for (int d = 0; d < a.head_dim; ++d) {
      from_float(output + d, to_float(output[d]) * weights.own + total[d] * inverse * weights.other);
    }
    *log_sum_exp = weights.log_sum_exp;
    return;
  }
  for (int d = 0; d < a.head_dim; ++d) from_float(output + d, sum == 0 ? 0.0f : total[d] * inverse);
  if (log_sum_exp != nullptr) *log_sum_exp = sum == 0 ? -HUGE_VALF : peak + logf(sum);
}

// `Cache` reads the blocks of the keys and values:
//   score(range, keys, queries [row, dim], dim, scores [row, kScoreStride], work): computes the scores of the split's
//     keys, and of up to seven further places;
//   add_values(range, keys, weights [row, kScoreStride], dim, output [row, dim], work): adds the weighted values;
//   work_floats(rows, dim): the size of `work`;
//   dim_of(head_dim): `dim`, the head dimension rounded up to a multiple of kLanes;
//   rotated: whether it holds keys and values rotated. rotate(row, head_dim) then rotates a query, which happens once
//     for all splits, and rotate_back(row, head_dim) a result;
//   merges: whether the outputs hold attention over other keys, which becomes that over all.
template <class Cache>
inline void decode_splits(const PagedAttentionArguments& a, const Cache& cache, Workers& workers) {
  // An item is one kv head of one batch entry. Item i has the splits split_start[i] .. split_start[i + 1] - 1.
  const int64_t items = int64_t{a.batch} * a.kv_heads;
  const auto range_of = [&](int64_t item) {
    return RowRange(a, static_cast<int32_t>(item / a.kv_heads), item % a.kv_heads);
  };
  int64_t splits = 0;
  int64_t most_rows = 0;
  for (int64_t item = 0; item < items; ++item) {
    const RowRange range = range_of(item);
    if (range.rows() == 0) continue;
    splits += divide_up(range.key_count, kSplitKeys);
    most_rows = range.rows() > most_rows ? range.rows() : most_rows;
  }
  Partials partials;
  partials.rows = most_rows;
  partials.dim = Cache::dim_of(a.head_dim);
  const int64_t rotated_floats = Cache::rotated ? int64_t{a.query_tokens} * a.query_heads * partials.dim : 0;
  const size_t start_bytes = static_cast<size_t>(items + 1) * sizeof(int64_t);
  int64_t* split_start = static_cast<int64_t*>(workers.shared_scratch(
      start_bytes + static_cast<size_t>(rotated_floats) * sizeof(float) + Partials::bytes(splits, most_rows, partials.dim)));
  float* rotated = reinterpret_cast<float*>(split_start + items + 1);
  partials.data = rotated + rotated_floats;
  split_start[0] = 0;
  for (int64_t item = 0; item < items; ++item) {
    const RowRange range = range_of(item);
    split_start[item + 1] =
        split_start[item] + (range.rows() == 0 ? 0 : divide_up(range.key_count, kSplitKeys));
  }

  // The rotated rows of an item are consecutive.
  const auto rotated_rows = [&](const RowRange& range) {
    const int64_t kv_head = range.first_head / range.group;
    return rotated + ((range.first_token - a.query_start[0]) * a.query_heads + kv_head * range.rows()) * partials.dim;
  };
  if constexpr (Cache::rotated) {
    workers.for_each(static_cast<size_t>(items), [&](size_t item, int) {
      const RowRange range = range_of(static_cast<int64_t>(item));
      float* rows = rotated_rows(range);
      with_float_type(a.query_dtype,
                      [&](auto element) { load_queries<decltype(element)>(a, range, partials.dim, rows); });
      for (int64_t row = 0; row < range.rows(); ++row) Cache::rotate(rows + row * partials.dim, a.head_dim);
    });
  }

  const size_t scratch_floats =
      static_cast<size_t>(most_rows * (partials.dim + kScoreStride) + cache.work_floats(most_rows, partials.dim));
  int64_t task_splits = splits / (workers.count() * kTasksPerWorker);
  task_splits = task_splits < 1 ? 1 : task_splits > kTaskSplits ? kTaskSplits : task_splits;
  workers.for_each(static_cast<size_t>(divide_up(splits, task_splits)), [&](size_t index, int worker) {
    float* scratch = static_cast<float*>(workers.scratch(worker, scratch_floats * sizeof(float)));
    const int64_t first_split = static_cast<int64_t>(index) * task_splits;
    const int64_t last_split = first_split + task_splits < splits ? first_split + task_splits : splits;
    int64_t item = 0;
    for (int64_t split = first_split; split < last_split; ++split) {
      while (split >= split_start[item + 1]) ++item;
      const RowRange range = range_of(item);
      const int32_t first_key = static_cast<int32_t>(split - split_start[item]) * kSplitKeys;
      const int32_t end = range.key_count < first_key + kSplitKeys ? range.key_count : first_key + kSplitKeys;
      // The worker usually takes the split behind this one next. A wrong guess costs a few cache lines.
      const int64_t next_split = split + 1 < splits ? split + 1 : split;
      int64_t next_item = item;
      while (next_split >= split_start[next_item + 1]) ++next_item;
      const int32_t next_key = static_cast<int32_t>(next_split - split_start[next_item]) * kSplitKeys;
      attend_split(a, cache, range, {first_key, end, next_key, range_of(next_item)}, partials, split, rotated_rows(range), scratch);
    }
  });
  workers.for_each(static_cast<size_t>(items), [&](size_t index, int) {
    const int64_t item = static_cast<int64_t>(index);
    const RowRange range = range_of(item);
    with_float_type(a.output_dtype, [&](auto element) {
      for (int64_t row = 0; row < range.rows(); ++row) {
        merge_row<decltype(element)>(a, cache, range, row, partials, split_start[item], split_start[item + 1]);
      }
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
