// Random codebooks and keys that are encoded, decoded and scored, for tests that compare devices and instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/coded-key-scores/coded-key-scores.h"
#include "kernels/decode-keys/decode-keys.h"
#include "kernels/encode-keys/encode-keys.h"
#include "runtime/workers.h"
#include "shared/coded-keys/centroid-index.h"
#include "tests/kernel-testing.h"

namespace kv {

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

// Every pointer of the arguments is to the vectors here. Blocks lie in random order.
struct CodedCase {
  using Bytes = std::vector<uint8_t>;

  CodedSizes sizes;
  std::vector<uint16_t> centroids;
  std::vector<float> scales;
  std::vector<uint32_t> index;  // aligned by the vector
  Bytes keys;
  Bytes codes;
  Bytes decoded;
  std::vector<int32_t> from, to, heads, table, counts, slot_numbers, query_start;
  Bytes queries;
  std::vector<float> scores;

  int groups() const { return sizes.head_dim / sizes.sub_dim; }
  int books() const { return sizes.separate ? groups() : 1; }
  int all_blocks() const { return sizes.slots * sizes.kv_heads * sizes.blocks; }
  int width() const { return sizes.blocks + 1; }
  int tokens() const { return sizes.slots * sizes.rows; }
  int query_heads() const { return sizes.kv_heads * sizes.group; }
  int64_t score_stride() const { return int64_t{width()} * kCodedBlockTokens; }

  static CodedCase random(std::mt19937& random, const CodedSizes& sizes) {
    CodedCase test;
    test.sizes = sizes;
    std::normal_distribution<float> normal;
    const int64_t book = int64_t{sizes.centroids} * sizes.sub_dim;
    const int64_t all_books = int64_t{sizes.kv_heads} * test.books();
    test.centroids.resize(static_cast<size_t>(all_books * book));
    for (uint16_t& number : test.centroids) number = elements::float_to_half(normal(random));
    const int64_t index_bytes = IndexShape(sizes.centroids, sizes.sub_dim).bytes();
    test.index.resize(static_cast<size_t>(all_books * index_bytes / 4));
    for (int64_t i = 0; i < all_books; ++i) {
      build_centroid_index(&test.centroids[static_cast<size_t>(i * book)], sizes.centroids, sizes.sub_dim,
                           reinterpret_cast<uint8_t*>(test.index.data()) + i * index_bytes);
    }
    if (sizes.scaled) {
      for (int i = 0; i < sizes.kv_heads * sizes.head_dim; ++i) test.scales.push_back(std::exp(normal(random)));
    }
    const auto fill = [&](Bytes& bytes, int64_t count) {
      bytes.resize(static_cast<size_t>(count) * byte_size(sizes.dtype));
      for (int64_t i = 0; i < count; ++i) write_element(sizes.dtype, bytes, i, normal(random) * (pick(random, 0, 100) == 0 ? 30 : 1));
    };
    const int64_t dense = int64_t{test.all_blocks()} * kCodedBlockTokens * sizes.head_dim;
    fill(test.keys, dense);
    for (int i = 0; i < 3; ++i) write_element(sizes.dtype, test.keys, pick(random, 0, static_cast<int>(dense) - 1), i == 0 ? NAN : INFINITY);
    test.decoded.assign(test.keys.size(), 0xa5);
    test.codes.assign(static_cast<size_t>(test.all_blocks() * coded_block_bytes(test.groups(), sizes.bits)), 0xa5);
    fill(test.queries, int64_t{test.tokens()} * test.query_heads() * sizes.head_dim);
    test.scores.assign(static_cast<size_t>(test.tokens() * test.query_heads() * test.score_stride()), NAN);
    test.place(random);
    return test;
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
    int64_t wrong = 0;
    const std::vector<bool> spoilt = spoilt_tokens();
    const int dims = sizes.head_dim;
    const double scale = 1.0f / std::sqrt(static_cast<float>(dims));
    for (int row = 0; row < tokens() * query_heads(); ++row) {
      const int slot = slot_numbers[static_cast<size_t>(row / query_heads() / sizes.rows)];
      const int head = row % query_heads() / sizes.group;
      const std::vector<double> query = read_elements(sizes.dtype, queries, int64_t{row} * dims, dims);
      double largest = 0;
      for (const double q : query) largest = std::max(largest, std::abs(q) * (sizes.scaled ? 100.0 : 1.0));
      const int counted = counts[static_cast<size_t>(slot * sizes.kv_heads + head)];
      for (int token = 0; token < width() * kCodedBlockTokens; ++token) {
        const double given = scores[static_cast<size_t>(row * score_stride() + token)];
        if (token >= counted) {
          wrong += !std::isnan(given);
          continue;
        }
        const int64_t block = dense_block(slot, head, token / kCodedBlockTokens);
        double exact = 0, magnitude = 0, length = 0;
        for (int d = 0; d < dims; ++d) {
          const double key = exact_key(head, block * kCodedBlockTokens + token % kCodedBlockTokens, d);
          exact += query[static_cast<size_t>(d)] * key;
          magnitude += std::abs(query[static_cast<size_t>(d)] * key);
          length += std::abs(key);
        }
        const double error = ((dims + 6) * 0x1p-24 + query_rounding) * magnitude + query_rounding * 0x1p-14 * largest * length;
        const bool is_spoilt = spoilt[static_cast<size_t>(block * kCodedBlockTokens + token % kCodedBlockTokens)];
        wrong += is_spoilt ? !std::isnan(given) : !(std::abs(given / scale - exact) <= error);
      }
    }
    return wrong;
  }

 private:
  void place(std::mt19937& random) {
    std::vector<int32_t> order(static_cast<size_t>(all_blocks()));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random);
    table.assign(static_cast<size_t>(sizes.slots * sizes.kv_heads * width()), -1);
    for (int slot = 0; slot < sizes.slots; ++slot) {
      slot_numbers.push_back(sizes.slots - 1 - slot);
      query_start.push_back(slot * sizes.rows);
      for (int head = 0; head < sizes.kv_heads; ++head) {
        // The last slot has less.
        const int held = slot == sizes.slots - 1 ? sizes.blocks / 2 : sizes.blocks;
        counts.push_back(held * kCodedBlockTokens);
        for (int block = 0; block < sizes.blocks; ++block) {
          const int dense = dense_block(slot, head, block);
          from.push_back(dense);
          to.push_back(order[static_cast<size_t>(dense)]);
          heads.push_back(head);
          if (block < held) table[static_cast<size_t>((slot * sizes.kv_heads + head) * width() + block)] = to.back();
        }
      }
    }
    query_start.push_back(tokens());
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
