// Random quantized blocks of keys that are scored, for tests of any device.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/quantized-key-scores/quantized-key-scores.h"
#include "runtime/workers.h"
#include "shared/quantized-blocks/quantized-blocks.h"
#include "tests/kernel-testing.h"

namespace kv {

struct ScoredSizes {
  DType dtype = DType::f16;
  int head_dim = 128;
  int bits = 8;
  bool rotated = true;
  int kv_heads = 2;
  int group = 4;   // query heads of a kv head
  int rows = 1;    // of each slot
  int blocks = 3;  // of each kv head; the last slot has half of them
  int slots = 2;
};

// Every pointer of the arguments is to the vectors here. Blocks lie in random order.
struct QuantizedScoresCase {
  ScoredSizes sizes;
  std::vector<uint8_t> keys;
  std::vector<int32_t> table, counts, slot_numbers, query_start;
  std::vector<uint8_t> queries;
  std::vector<float> scores;

  int all_blocks() const { return sizes.slots * sizes.kv_heads * sizes.blocks; }
  int width() const { return sizes.blocks + 1; }
  int tokens() const { return sizes.slots * sizes.rows; }
  int query_heads() const { return sizes.kv_heads * sizes.group; }
  int64_t score_stride() const { return int64_t{width()} * kQuantizedBlockTokens; }

  static QuantizedScoresCase random(std::mt19937& random, const ScoredSizes& sizes) {
    QuantizedScoresCase test;
    test.sizes = sizes;
    const int64_t bytes = quantized_block_bytes(sizes.head_dim, sizes.bits);
    test.keys.resize(static_cast<size_t>(test.all_blocks() * bytes));
    for (int64_t i = 0; i < static_cast<int64_t>(test.keys.size()); ++i) {
      const bool scale = i % bytes >= scale_offset(sizes.head_dim, sizes.bits);
      const int byte = pick(random, 0, 255);
      test.keys[static_cast<size_t>(i)] = static_cast<uint8_t>(scale ? pick(random, 0x50, 0x90) : sizes.bits == 8 && byte == 128 ? 0 : byte);
    }
    std::normal_distribution<float> normal;
    const int64_t elements = int64_t{test.tokens()} * test.query_heads() * sizes.head_dim;
    test.queries.resize(static_cast<size_t>(elements) * byte_size(sizes.dtype));
    for (int64_t i = 0; i < elements; ++i) write_element(sizes.dtype, test.queries, i, normal(random) * (pick(random, 0, 50) == 0 ? 20 : 1));
    test.scores.assign(static_cast<size_t>(test.tokens() * test.query_heads() * test.score_stride()), NAN);
    std::vector<int32_t> order(static_cast<size_t>(test.all_blocks()));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    test.table.assign(static_cast<size_t>(sizes.slots * sizes.kv_heads * test.width()), -1);
    for (int slot = 0; slot < sizes.slots; ++slot) {
      test.slot_numbers.push_back(sizes.slots - 1 - slot);
      test.query_start.push_back(slot * sizes.rows);
      for (int head = 0; head < sizes.kv_heads; ++head) {
        const int row = slot * sizes.kv_heads + head;
        const int held = slot == sizes.slots - 1 ? sizes.blocks / 2 : sizes.blocks;
        test.counts.push_back(held * kQuantizedBlockTokens);
        for (int block = 0; block < held; ++block) {
          test.table[static_cast<size_t>(row * test.width() + block)] = order[static_cast<size_t>(row * sizes.blocks + block)];
        }
      }
    }
    test.query_start.push_back(test.tokens());
    return test;
  }

  QuantizedKeyScoresArguments arguments() {
    QuantizedKeyScoresArguments a;
    a.batch = a.slot_count = sizes.slots;
    a.kv_heads = sizes.kv_heads;
    a.head_dim = sizes.head_dim;
    a.query_start = query_start.data();
    a.query_tokens = tokens();
    a.slots = slot_numbers.data();
    a.block_count = all_blocks();
    a.block_table = table.data();
    a.table_width = width();
    a.key_counts = counts.data();
    a.query = queries.data();
    a.query_head_stride = sizes.head_dim;
    a.query_token_stride = int64_t{query_heads()} * sizes.head_dim;
    a.query_dtype = sizes.dtype;
    a.query_heads = query_heads();
    a.scores = scores.data();
    a.score_head_stride = score_stride();
    a.score_token_stride = query_heads() * score_stride();
    a.scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
    a.keys = keys.data();
    a.key_bits = sizes.bits;
    a.rotated = sizes.rotated;
    return a;
  }

  bool run_on_cpu(Isa isa, int threads) {
    Workers workers(threads);
    ExecutionContext context{workers, isa};
    return quantized_key_scores(arguments(), context).ok();
  }

  // How many of the scores are further from float64 than rounding takes them, with queries rounded to multiples of their
  // largest dim times `query_rounding`; and how many were written that should not have been.
  int64_t wrong_scores(double query_rounding) const {
    int64_t wrong = 0;
    const int dims = sizes.head_dim;
    const double scale = 1.0f / std::sqrt(static_cast<float>(dims));
    for (int row = 0; row < tokens() * query_heads(); ++row) {
      const std::vector<double> given = read_elements(sizes.dtype, queries, int64_t{row} * dims, dims);
      const std::vector<double> query = sizes.rotated ? rotated(given) : given;
      const double norm = std::sqrt(std::inner_product(given.begin(), given.end(), given.begin(), 0.0));
      double largest = 0;
      for (const double q : query) largest = std::max(largest, std::abs(q));
      const int slot = slot_numbers[static_cast<size_t>(row / query_heads() / sizes.rows)];
      const int cache_head = slot * sizes.kv_heads + row % query_heads() / sizes.group;
      for (int token = 0; token < width() * kQuantizedBlockTokens; ++token) {
        const double score = scores[static_cast<size_t>(row * score_stride() + token)];
        if (token >= counts[static_cast<size_t>(cache_head)]) {
          wrong += !std::isnan(score);
          continue;
        }
        const int block = table[static_cast<size_t>(cache_head * width() + token / kQuantizedBlockTokens)];
        double exact = 0, magnitude = 0, length = 0;
        for (int d = 0; d < dims; ++d) {
          const double key = key_of(block, token % kQuantizedBlockTokens, d);
          exact += query[static_cast<size_t>(d)] * key;
          magnitude += std::abs(query[static_cast<size_t>(d)] * key);
          length += std::abs(key);
        }
        // A rotation rounds each dim once a stage, relative to the row's length.
        const double rotation = sizes.rotated ? (std::log2(dims) + 3) * 0x1p-24 * norm : 0;
        const double error = (dims + 6) * 0x1p-24 * magnitude + (rotation + query_rounding * (largest + rotation)) * length;
        wrong += !(std::abs(score / scale - exact) <= error * 1.001);
      }
    }
    return wrong;
  }

 private:
  std::vector<double> rotated(std::vector<double> row) const {
    const int run = rotation_run(sizes.head_dim);
    for (int d = 0; d < sizes.head_dim; ++d) row[static_cast<size_t>(d)] *= rotation_negates(d) ? -1 : 1;
    for (int stride = 1; stride < run; stride *= 2) {
      for (int d = 0; d < sizes.head_dim; ++d) {
        if (d & stride) continue;
        double& a = row[static_cast<size_t>(d)];
        double& b = row[static_cast<size_t>(d + stride)];
        const double sum = a + b;
        b = a - b;
        a = sum;
      }
    }
    for (double& x : row) x /= std::sqrt(run);
    return row;
  }

  // What the code of a dim stands for.
  double key_of(int block, int token, int dim) const {
    const uint8_t* bytes = &keys[static_cast<size_t>(block * quantized_block_bytes(sizes.head_dim, sizes.bits))];
    const uint8_t* row = bytes + token * code_row_bytes(sizes.head_dim, sizes.bits);
    const int groups = quantized_groups(sizes.head_dim);
    const uint8_t scale = bytes[scale_offset(sizes.head_dim, sizes.bits) + token * groups + dim / 32];
    const double step = elements::half_to_float(static_cast<uint16_t>(scale << 7)) / 16;
    if (sizes.bits == 8) return static_cast<int8_t>(row[dim]) * step;
    if (sizes.bits == 4) return ((row[dim / 32 * 16 + dim % 16] >> dim % 32 / 16 * 4 & 15) - 7.5) * step;
    const int sixteen = dim % 64 / 16;
    int code = row[dim / 64 * 16 + dim % 16] >> 2 * sixteen & 3;
    if (sizes.bits == 2) return (code - 1.5) * step;
    const uint8_t* upper = bytes + upper_offset(sizes.head_dim, 3) + token * upper_row_bytes(sizes.head_dim, 3) + dim / 64 * 8;
    code |= (upper[dim % 8] >> (dim / 8 % 2 * 4 + sixteen) & 1) << 2;
    return (code - 3.5) * step;
  }
};

}  // namespace kv
