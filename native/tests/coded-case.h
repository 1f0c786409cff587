// Random codebooks and keys that are encoded, decoded and scored, for tests that compare devices and instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/coded-key-scores/coded-key-scores.h"
#include "kernels/decode-keys/decode-keys.h"
#include "kernels/encode-keys/encode-keys.h"
#include "kernels/index-centroids/index-centroids.h"
#include "runtime/isa.h"
#include "runtime/workers.h"
#include "shared/coded-keys/centroid-index.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "tests/key-scores-case.h"

namespace kv {

KV_CPU_KERNEL(index_centroids, IndexCentroidsArguments)

struct CodedSizes {
  DType dtype = DType::f16;  // of keys and queries
  int head_dim = 128;
  int sub_dim = 2;
  int centroids = 256;
  int bits = 8;
  bool separate = false;
  bool scaled = false;
  int kv_heads = 2;
  int group = 4;   // query heads of a kv head
  int rows = 1;    // of each slot
  int blocks = 3;  // of each kv head and slot
  int slots = 2;
};

struct CodedCase : KeyScoresCase<CodedSizes> {
  using Bytes = std::vector<uint8_t>;

  std::vector<uint16_t> centroids;
  std::vector<float> scales;
  std::vector<uint32_t> index;  // aligned by the vector
  Bytes keys;
  Bytes codes;
  Bytes decoded;
  std::vector<int32_t> from, to, heads;
  static constexpr int kRangeParts = 3;
  std::vector<float> ranges;

  int groups() const { return sizes.head_dim / sizes.sub_dim; }
  int books() const { return sizes.separate ? groups() : 1; }

  static CodedCase random(std::mt19937& random, const CodedSizes& sizes) {
    CodedCase test;
    test.sizes = sizes;
    std::normal_distribution<float> normal;
    const int64_t book = int64_t{sizes.centroids} * sizes.sub_dim;
    const int64_t all_books = int64_t{sizes.kv_heads} * test.books();
    test.centroids.resize(static_cast<size_t>(all_books * book));
    for (uint16_t& number : test.centroids) number = elements::float_to_half(normal(random));
    test.index_books(best_isa(), 1);
    if (sizes.scaled) {
      for (int i = 0; i < sizes.kv_heads * sizes.head_dim; ++i) test.scales.push_back(std::exp(normal(random)));
    }
    const int64_t dense = int64_t{test.all_blocks()} * kCodedBlockTokens * sizes.head_dim;
    test.keys.resize(static_cast<size_t>(dense) * byte_size(sizes.dtype));
    for (int64_t i = 0; i < dense; ++i) write_element(sizes.dtype, test.keys, i, normal(random) * (pick(random, 0, 100) == 0 ? 30 : 1));
    for (int i = 0; i < 3; ++i) write_element(sizes.dtype, test.keys, pick(random, 0, static_cast<int>(dense) - 1), i == 0 ? NAN : INFINITY);
    test.decoded.assign(test.keys.size(), 0xa5);
    test.codes.assign(static_cast<size_t>(test.all_blocks() * coded_block_bytes(test.groups(), sizes.bits)), 0xa5);
    test.draw_queries(random, 100, 30);
    test.ranges.assign(static_cast<size_t>(test.tokens() * test.query_heads() * kRangeParts * 2), 7);
    test.place(random);
    return test;
  }

  void index_books(Isa isa, int threads) {
    IndexCentroidsArguments a;
    a.books = int64_t{sizes.kv_heads} * books();
    a.centroid_count = sizes.centroids;
    a.sub_dim = sizes.sub_dim;
    index.assign(static_cast<size_t>(a.books * IndexShape(sizes.centroids, sizes.sub_dim).bytes() / 4), 0xa5a5a5a5);
    a.centroids = centroids.data();
    a.index = reinterpret_cast<uint8_t*>(index.data());
    Workers workers(threads);
    ExecutionContext context{workers};
    context.isa = isa;
    index_centroids_cpu(a, context);
  }

  CodedKeys coded() {
    CodedKeys k;
    k.codes = reinterpret_cast<uint32_t*>(codes.data());
    k.block_count = all_blocks();
    k.code_bits = sizes.bits;
    k.centroids = centroids.data();
    k.centroid_count = sizes.centroids;
    k.books = books();
    k.sub_dim = sizes.sub_dim;
    k.channel_scale = sizes.scaled ? scales.data() : nullptr;
    k.kv_heads = sizes.kv_heads;
    k.head_dim = sizes.head_dim;
    return k;
  }

  EncodeKeysArguments encoding() {
    EncodeKeysArguments a;
    static_cast<CodedKeyCopies&>(a) = copies(keys, from, to);
    a.index = reinterpret_cast<const uint8_t*>(index.data());
    return a;
  }

  DecodeKeysArguments decoding() { return copies(decoded, to, from); }

  CodedKeyScoresArguments scoring() {
    CodedKeyScoresArguments a;
    a.coded = coded();
    a.ranges = ranges.data();
    a.range_parts = kRangeParts;
    describe(a);
    return a;
  }

  bool run_on_cpu(Isa isa, int threads) {
    Workers workers(threads);
    ExecutionContext context{workers};
    context.isa = isa;
    return encode_keys(encoding(), context).ok() && decode_keys(decoding(), context).ok() &&
           coded_key_scores(scoring(), context).ok();
  }

  // NaN as one number that equals itself.
  std::vector<double> decoded_numbers() const {
    std::vector<double> numbers = read_elements(sizes.dtype, decoded, 0, static_cast<int64_t>(decoded.size() / byte_size(sizes.dtype)));
    for (double& x : numbers) x = std::isnan(x) ? HUGE_VAL : x;
    return numbers;
  }

  // The dense block that has the keys of a place in the table.
  int dense_block(int slot, int head, int block) const { return (slot * sizes.kv_heads + head) * sizes.blocks + block; }

  // How many of the scores are further from those of the decoded keys than rounding takes them, with queries rounded
  // relatively by `query_rounding`; and how many were written that should not have been.
  int64_t wrong_scores(double query_rounding) const {
    const std::vector<bool> spoilt = spoilt_tokens();
    const int dims = sizes.head_dim;
    return count_wrong([&](const std::vector<double>& query, int slot, int head) {
      double largest = 0;
      for (const double q : query) largest = std::max(largest, std::abs(q) * (sizes.scaled ? 100.0 : 1.0));
      return [=, &spoilt](int token, double product) {
        const int64_t block = dense_block(slot, head, token / kBlockTokens);
        const int64_t place = block * kBlockTokens + token % kBlockTokens;
        if (spoilt[static_cast<size_t>(place)]) return !std::isnan(product);
        double exact = 0, magnitude = 0, length = 0;
        for (int d = 0; d < dims; ++d) {
          const double key = exact_key(head, place, d);
          exact += query[static_cast<size_t>(d)] * key;
          magnitude += std::abs(query[static_cast<size_t>(d)] * key);
          length += std::abs(key);
        }
        const double error = ((dims + 6) * 0x1p-24 + query_rounding) * magnitude + query_rounding * 0x1p-14 * largest * length;
        return !(std::abs(product - exact) <= error);
      };
    });
  }

  // How many rows and heads have other least and largest scores than their ranges say.
  int64_t wrong_ranges() const {
    int64_t wrong = 0;
    for (int row = 0; row < tokens() * query_heads(); ++row) {
      const int slot = slot_numbers[static_cast<size_t>(row / query_heads() / sizes.rows)];
      const int held = counts[static_cast<size_t>(slot * sizes.kv_heads + row % query_heads() / sizes.group)];
      float least = INFINITY, most = -INFINITY, given_least = INFINITY, given_most = -INFINITY;
      for (int token = 0; token < held; ++token) {
        const float score = scores[static_cast<size_t>(row * score_stride() + token)];
        least = std::min(least, score);
        most = std::isnan(score) || std::isnan(most) ? NAN : std::max(most, score);
      }
      for (int part = 0; part < kRangeParts; ++part) {
        const float* range = &ranges[static_cast<size_t>(row * kRangeParts + part) * 2];
        given_least = std::min(given_least, range[0]);
        given_most = std::isnan(range[1]) || std::isnan(given_most) ? NAN : std::max(given_most, range[1]);
      }
      wrong += std::isnan(most) ? !std::isnan(given_most) : given_most != most || given_least != least;
    }
    return wrong;
  }

 private:
  void place(std::mt19937& random) {
    to = place_blocks(random);
    from.resize(to.size());
    std::iota(from.begin(), from.end(), 0);
    for (const int32_t dense : from) heads.push_back(dense / sizes.blocks % sizes.kv_heads);
  }

  CodedKeyCopies copies(Bytes& dense, const std::vector<int32_t>& read, const std::vector<int32_t>& written) {
    CodedKeyCopies a;
    static_cast<CodedKeys&>(a) = coded();
    a.keys = dense.data();
    a.dtype = sizes.dtype;
    a.token_stride = sizes.head_dim;
    a.block_stride = int64_t{kCodedBlockTokens} * sizes.head_dim;
    a.from = read.data();
    a.to = written.data();
    a.heads = heads.data();
    a.copies = static_cast<int32_t>(read.size());
    return a;
  }

  // Of the tokens of the dense blocks, those with a number that is not finite.
  std::vector<bool> spoilt_tokens() const {
    const std::vector<double> numbers = read_elements(sizes.dtype, keys, 0, static_cast<int64_t>(keys.size() / byte_size(sizes.dtype)));
    std::vector<bool> spoilt(numbers.size() / static_cast<size_t>(sizes.head_dim));
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (!std::isfinite(numbers[i])) spoilt[i / static_cast<size_t>(sizes.head_dim)] = true;
    }
    return spoilt;
  }

  // What the code of a token of the dense blocks stands for, before any rounding to the blocks' dtype.
  double exact_key(int head, int64_t token, int dim) const {
    const int block = to[static_cast<size_t>(token / kCodedBlockTokens)];
    const int group = dim / sizes.sub_dim;
    const int code = code_of(block, static_cast<int>(token % kCodedBlockTokens), group);
    const int64_t book = int64_t{head} * books() + (sizes.separate ? group : 0);
    const auto place = static_cast<size_t>((book * sizes.centroids + code) * sizes.sub_dim + dim % sizes.sub_dim);
    const double scale = sizes.scaled ? scales[static_cast<size_t>(head * sizes.head_dim + dim)] : 1.0;
    return elements::half_to_float(centroids[place]) * scale;
  }

  int code_of(int block, int token, int group) const {
    const int chunk = group / kChunkGroups;
    const int step = kChunkOctets * quads_of_chunk(groups(), chunk);
    const int bit = (token / 32 * 16 + token % 4 * 4 + group % 4) * sizes.bits;
    const int64_t word = block * coded_block_words(groups(), sizes.bits) + chunk_offset(chunk, sizes.bits) + bit / 32 * step +
                         token % 32 / 4 * quads_of_chunk(groups(), chunk) + group % kChunkGroups / 4;
    uint32_t low = 0, high = 0;
    std::memcpy(&low, &codes[static_cast<size_t>(4 * word)], 4);
    if (bit % 32 + sizes.bits > 32) std::memcpy(&high, &codes[static_cast<size_t>(4 * (word + step))], 4);
    return static_cast<int>((low | uint64_t{high} << 32) >> bit % 32) & ((1 << sizes.bits) - 1);
  }
};

}  // namespace kv
