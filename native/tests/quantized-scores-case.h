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
#include "tests/key-scores-case.h"

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

struct QuantizedScoresCase : KeyScoresCase<ScoredSizes> {
  std::vector<uint8_t> keys;

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
    test.draw_queries(random, 50, 20);
    test.place_blocks(random);
    return test;
  }

  QuantizedKeyScoresArguments arguments() {
    QuantizedKeyScoresArguments a;
    describe(a);
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
    const int dims = sizes.head_dim;
    const std::vector<double> all_keys = decoded();
    return count_wrong([&](const std::vector<double>& given, int slot, int head) {
      const std::vector<double> query = sizes.rotated ? rotated(given) : given;
      const double norm = std::sqrt(std::inner_product(given.begin(), given.end(), given.begin(), 0.0));
      double largest = 0;
      for (const double q : query) largest = std::max(largest, std::abs(q));
      return [=, &all_keys](int token, double product) {
        const int row = slot * sizes.kv_heads + head;
        const int block = table[static_cast<size_t>(row * width() + token / kBlockTokens)];
        const double* keys_of_token = &all_keys[static_cast<size_t>((block * kBlockTokens + token % kBlockTokens) * dims)];
        const double* q = query.data();
        double exact = 0, magnitude = 0, length = 0;
        for (int d = 0; d < dims; ++d) {
          const double key = keys_of_token[d];
          const double term = q[d] * key;
          exact += term;
          magnitude += std::abs(term);
          length += std::abs(key);
        }
        // A rotation rounds each dim once a stage, relative to the row's length.
        const double rotation = sizes.rotated ? (std::log2(dims) + 3) * 0x1p-24 * norm : 0;
        const double error = (dims + 6) * 0x1p-24 * magnitude + (rotation + query_rounding * (largest + rotation)) * length;
        return !(std::abs(product - exact) <= error * 1.001);
      };
    });
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

  // What the codes of all blocks stand for, `[block, token, dim]`.
  std::vector<double> decoded() const {
    std::vector<double> all;
    all.reserve(static_cast<size_t>(all_blocks() * kBlockTokens * sizes.head_dim));
    for (int block = 0; block < all_blocks(); ++block) {
      for (int token = 0; token < kBlockTokens; ++token) {
        for (int d = 0; d < sizes.head_dim; ++d) all.push_back(key_of(block, token, d));
      }
    }
    return all;
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
