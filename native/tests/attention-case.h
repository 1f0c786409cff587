// Random paged-attention cases and a double-precision oracle, shared by the attention tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "runtime/execution.h"
#include "shared/paged/paged-attention.h"
#include "tests/kernel-testing.h"

namespace kv {

struct AttentionShape {
  std::vector<int32_t> queries;     // of each batch entry
  std::vector<int32_t> key_counts;  // [batch, kv_head]
  int32_t query_heads = 1;
  int32_t kv_heads = 1;
  int32_t head_dim = 64;
  int32_t block_tokens = 64;
  DType query_dtype = DType::f32;
  DType cache_dtype = DType::f32;
  DType output_dtype = DType::f32;
  bool causal = true;
  // Inputs on a grid so coarse that every score is exact in f32; `score_shift` (a square of an integer)
  // is then added to every score.
  bool exact = false;
  double score_shift = 0;
  // Powers of two that random queries, keys and values are multiplied by.
  int query_exponent = 0, key_exponent = 0, value_exponent = 0;
  bool shuffled = true;  // blocks in random order, slots in descending order
  int64_t gap = 0;       // elements between rows that belong to nobody
};

// One row by the oracle, and how far f32 arithmetic may be from it, storing the output apart. A row that sees no
// key is zeros and -infinity.
struct WantedRow {
  std::vector<double> output;
  double output_error = 0;
  double log_sum_exp = -std::numeric_limits<double>::infinity();
  double log_sum_exp_error = 0;
};

// Owns every buffer that `arguments` points to.
struct AttentionCase {
  AttentionShape shape;
  PagedAttentionArguments arguments;
  std::vector<uint8_t> query, keys, values, output;
  std::vector<float> log_sum_exp;
  std::vector<int32_t> block_table, key_counts, slots, query_start;

  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  AttentionCase(AttentionShape given, unsigned seed) : shape(std::move(given)) {
    const AttentionShape& s = shape;
    std::mt19937 random(seed);
    PagedAttentionArguments& a = arguments;
    a.batch = static_cast<int32_t>(s.queries.size());
    a.query_heads = s.query_heads;
    a.kv_heads = s.kv_heads;
    a.head_dim = s.head_dim;
    a.causal = s.causal;
    a.scale = s.exact ? 0.25f : 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    a.query_dtype = s.query_dtype;
    a.cache_dtype = s.cache_dtype;
    a.output_dtype = s.output_dtype;
    query_start.assign(1, 0);
    for (const int32_t n : s.queries) query_start.push_back(query_start.back() + n);
    const int64_t tokens = query_start.back();
    a.query_tokens = query_start.back();

    a.query_head_stride = a.output_head_stride = s.head_dim + s.gap;
    a.query_token_stride = a.output_token_stride = s.query_heads * a.query_head_stride + s.gap;
    fill(random, s.query_dtype, query, tokens * a.query_token_stride, s.query_exponent);
    output.resize(static_cast<size_t>(tokens * a.output_token_stride) * byte_size(s.output_dtype));
    log_sum_exp.resize(static_cast<size_t>(tokens * s.query_heads));

    const int32_t longest = *std::max_element(s.key_counts.begin(), s.key_counts.end());
    a.block_tokens = s.block_tokens;
    a.table_width = (longest + s.block_tokens - 1) / s.block_tokens + 1;
    a.token_stride = s.head_dim + s.gap;
    a.block_stride = s.block_tokens * a.token_stride + s.gap;
    const int64_t blocks = int64_t{a.batch} * s.kv_heads * a.table_width;
    a.block_count = static_cast<int32_t>(blocks);
    a.slot_count = a.batch;
    block_table.resize(static_cast<size_t>(blocks));
    std::iota(block_table.begin(), block_table.end(), 0);
    slots.resize(s.queries.size());
    std::iota(slots.begin(), slots.end(), 0);
    if (s.shuffled) {
      std::shuffle(block_table.begin(), block_table.end(), random);
      std::reverse(slots.begin(), slots.end());
    }
    key_counts.resize(s.key_counts.size());
    for (int32_t b = 0; b < a.batch; ++b) {
      for (int32_t h = 0; h < s.kv_heads; ++h)
        count_of(b, h) = s.key_counts[static_cast<size_t>(b * s.kv_heads + h)];
    }
    fill(random, s.cache_dtype, keys, blocks * a.block_stride, s.key_exponent);
    fill(random, s.cache_dtype, values, blocks * a.block_stride, s.value_exponent);
    if (s.exact) shift_scores(tokens, blocks);
    spoil_rest(keys);
    spoil_rest(values);

    a.query = query.data();
    a.output = output.data();
    a.log_sum_exp = log_sum_exp.data();
    a.keys = keys.data();
    a.values = values.data();
    a.block_table = block_table.data();
    a.key_counts = key_counts.data();
    a.slots = slots.data();
    a.query_start = query_start.data();
    poison();
  }

  int32_t& count_of(int32_t b, int32_t kv_head) {
    return key_counts[static_cast<size_t>(slots[static_cast<size_t>(b)] * shape.kv_heads + kv_head)];
  }

  int32_t count_of(int32_t b, int32_t kv_head) const {
    return const_cast<AttentionCase*>(this)->count_of(b, kv_head);
  }

  int64_t cache_index(int32_t b, int32_t kv_head, int32_t key) const {
    const int64_t cache_head = int64_t{slots[static_cast<size_t>(b)]} * shape.kv_heads + kv_head;
    const int64_t block =
        block_table[static_cast<size_t>(cache_head * arguments.table_width + key / shape.block_tokens)];
    return block * arguments.block_stride + (key % shape.block_tokens) * arguments.token_stride;
  }

  // f64 `[key, dim]` of one entry and kv head, from `pool`: the keys or the values.
  std::vector<double> cached(const std::vector<uint8_t>& pool, int32_t b, int32_t kv_head) const {
    std::vector<double> all;
    for (int32_t key = 0; key < count_of(b, kv_head); ++key) {
      const std::vector<double> row =
          read_elements(shape.cache_dtype, pool, cache_index(b, kv_head, key), shape.head_dim);
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }

  void poison() {
    std::fill(output.begin(), output.end(), uint8_t{0xff});
    std::fill(log_sum_exp.begin(), log_sum_exp.end(), std::numeric_limits<float>::quiet_NaN());
  }

  // What the oracle says of every row, `[token, query_head]`.
  std::vector<WantedRow> oracle() const {
    std::vector<WantedRow> rows(log_sum_exp.size());
    const int32_t group = shape.query_heads / shape.kv_heads;
    for (int32_t b = 0; b < arguments.batch; ++b) {
      for (int32_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
        const std::vector<double> head_keys = cached(keys, b, kv_head);
        const std::vector<double> head_values = cached(values, b, kv_head);
        for (int32_t i = 0; i < shape.queries[static_cast<size_t>(b)]; ++i) {
          for (int32_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
            rows[row_index(b, i, h)] = wanted_row(b, i, h, head_keys.data(), head_values.data());
          }
        }
      }
    }
    return rows;
  }

  // Compares output and log_sum_exp with the oracle; prints the first difference. Returns whether all agree.
  bool agrees(const std::vector<WantedRow>& wanted, Isa isa) const {
    const char* what = isa_name(isa);
    for (int32_t b = 0; b < arguments.batch; ++b) {
      for (int32_t i = 0; i < shape.queries[static_cast<size_t>(b)]; ++i) {
        for (int32_t h = 0; h < shape.query_heads; ++h) {
          if (!row_agrees(b, i, h, wanted[row_index(b, i, h)], what)) return false;
        }
      }
    }
    return gaps_untouched(what);
  }

 private:
  void fill(std::mt19937& random, DType dtype, std::vector<uint8_t>& bytes, int64_t count, int exponent) {
    bytes.resize(static_cast<size_t>(count) * byte_size(dtype));
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> quarters(-8, 8);
    for (int64_t i = 0; i < count; ++i) {
      write_element(dtype, bytes, i,
                    shape.exact ? 0.25f * static_cast<float>(quarters(random)) : std::ldexp(normal(random), exponent));
    }
  }

  // Dimension 0 of every query and key becomes a constant, so that scale * their product is the shift.
  void shift_scores(int64_t tokens, int64_t blocks) {
    const float root = static_cast<float>(2 * std::sqrt(shape.score_shift));
    for (int64_t t = 0; t < tokens; ++t) {
      for (int32_t h = 0; h < shape.query_heads; ++h) {
        write_element(shape.query_dtype, query,
                      t * arguments.query_token_stride + h * arguments.query_head_stride, root);
      }
    }
    for (int64_t block = 0; block < blocks; ++block) {
      for (int32_t t = 0; t < shape.block_tokens; ++t) {
        write_element(shape.cache_dtype, keys, block * arguments.block_stride + t * arguments.token_stride,
                      root);
      }
    }
  }

  // What no head counts becomes NaN: it must show in no result.
  void spoil_rest(std::vector<uint8_t>& pool) const {
    const std::vector<uint8_t> given = pool;
    const int64_t size = static_cast<int64_t>(byte_size(shape.cache_dtype));
    for (int64_t i = 0; i < static_cast<int64_t>(pool.size()) / size; ++i) {
      write_element(shape.cache_dtype, pool, i, std::numeric_limits<float>::quiet_NaN());
    }
    for (int32_t b = 0; b < arguments.batch; ++b) {
      for (int32_t head = 0; head < shape.kv_heads; ++head) {
        for (int32_t key = 0; key < count_of(b, head); ++key) {
          const int64_t first = cache_index(b, head, key) * size;
          std::copy_n(given.begin() + first, shape.head_dim * size, pool.begin() + first);
        }
      }
    }
  }

  size_t row_index(int32_t b, int32_t i, int32_t h) const {
    return static_cast<size_t>((query_start[static_cast<size_t>(b)] + i) * shape.query_heads + h);
  }

  WantedRow wanted_row(int32_t b, int32_t i, int32_t h, const double* head_keys, const double* head_values) const {
    const AttentionShape& s = shape;
    const int32_t kv_head = h / (s.query_heads / s.kv_heads);
    const int32_t n = s.queries[static_cast<size_t>(b)];
    const int32_t keys_of_head = count_of(b, kv_head);
    const int32_t visible = std::max(0, s.causal ? keys_of_head - n + i + 1 : keys_of_head);
    const int64_t token = query_start[static_cast<size_t>(b)] + i;
    const int64_t query_at = token * arguments.query_token_stride + h * arguments.query_head_stride;

    const int32_t dim = s.head_dim;
    const double scale = arguments.scale;
    const std::vector<double> query_row = read_elements(s.query_dtype, query, query_at, dim);
    std::vector<double> scores(static_cast<size_t>(visible));
    double largest = -std::numeric_limits<double>::infinity();
    double largest_magnitude = 0;  // of sum |scale * q * k|, which bounds the rounding of a score
    for (int32_t key = 0; key < visible; ++key) {
      const double* q = query_row.data();
      const double* k = head_keys + int64_t{key} * dim;
      double score = 0;
      double magnitude = 0;
      for (int32_t d = 0; d < dim; ++d) {
        const double term = q[d] * k[d] * scale;
        score += term;
        magnitude += std::fabs(term);
      }
      scores[static_cast<size_t>(key)] = score;
      largest = std::max(largest, score);
      largest_magnitude = std::max(largest_magnitude, magnitude);
    }
    double sum = 0;
    std::vector<double> weights;
    for (const double score : scores) {
      weights.push_back(std::exp(score - largest));
      sum += weights.back();
    }
    WantedRow row;
    row.output.assign(static_cast<size_t>(dim), 0.0);
    double largest_value = 0;
    for (int32_t d = 0; d < dim && visible > 0; ++d) {
      const double* w = weights.data();
      double weighted = 0;
      for (int32_t key = 0; key < visible; ++key) {
        const double value = head_values[int64_t{key} * dim + d];
        weighted += w[key] * value;
        const double size = std::fabs(value);
        if (size > largest_value) largest_value = size;
      }
      row.output[static_cast<size_t>(d)] = weighted / sum;
    }
    if (visible == 0) return row;

    // A score is a chain of head_dim additions and a scaling; on the exact grid it has no error. A weight
    // carries twice that, the rounding of its exponential (4) and of two products for each rescaling
    // (once in 64 keys); a sum over `visible` weights adds that many roundings. The quotient of two such
    // sums carries twice the whole.
    const double u = 0x1p-24;
    const double score_error = s.exact ? 0 : (dim + 4) * u * largest_magnitude;
    const double sum_error = 2 * score_error + u * (visible * (1 + 2.0 / 64) + 8);
    row.output_error = 2 * sum_error * largest_value;
    row.log_sum_exp = largest + std::log(sum);
    row.log_sum_exp_error = sum_error + 2 * u * (std::fabs(row.log_sum_exp) + std::fabs(std::log(sum)));
    return row;
  }

  bool row_agrees(int32_t b, int32_t i, int32_t h, const WantedRow& wanted, const char* what) const {
    const int64_t token = query_start[static_cast<size_t>(b)] + i;
    const int64_t output_at = token * arguments.output_token_stride + h * arguments.output_head_stride;
    for (int32_t d = 0; d < shape.head_dim; ++d) {
      const double want = wanted.output[static_cast<size_t>(d)];
      const double got = read_element(shape.output_dtype, output, output_at + d);
      const double tolerance =
          wanted.output_error + unit_roundoff(shape.output_dtype) * std::fabs(want) + std::ldexp(0x1p-25, shape.value_exponent);
      if (!(std::fabs(got - want) <= tolerance)) {
        std::printf("%s: output[entry %d, query %d, head %d, dim %d] is %.9g, want %.9g within %.3g\n", what,
                    b, i, h, d, got, want, tolerance);
        return false;
      }
    }
    const float got = log_sum_exp[row_index(b, i, h)];
    if (std::isinf(wanted.log_sum_exp)) {
      if (std::isinf(got) && got < 0) return true;
      std::printf("%s: log_sum_exp of a masked row is %g, want -inf\n", what, static_cast<double>(got));
      return false;
    }
    if (std::fabs(got - wanted.log_sum_exp) <= wanted.log_sum_exp_error) return true;
    std::printf("%s: log_sum_exp[entry %d, query %d, head %d] is %.9g, want %.9g within %.3g\n", what, b, i,
                h, static_cast<double>(got), wanted.log_sum_exp, wanted.log_sum_exp_error);
    return false;
  }

  bool gaps_untouched(const char* what) const {
    const int64_t size = static_cast<int64_t>(byte_size(shape.output_dtype));
    for (int64_t i = 0; i < static_cast<int64_t>(output.size()); ++i) {
      const int64_t in_token = i / size % arguments.output_token_stride;
      const bool owned = in_token < shape.query_heads * arguments.output_head_stride &&
                         in_token % arguments.output_head_stride < shape.head_dim;
      if (!owned && output[static_cast<size_t>(i)] != 0xff) {
        std::printf("%s: wrote between rows, at element %lld\n", what, static_cast<long long>(i / size));
        return false;
      }
    }
    return true;
  }
};

}  // namespace kv
