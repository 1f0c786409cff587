// Queries of a batch, and where the coded blocks of keys lie that they are scored with, for tests of any device.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "shared/key-scores/key-scores.h"
#include "tests/kernel-testing.h"

namespace kv {

// `Sizes` has dtype, head_dim, kv_heads, group, rows, blocks and slots. Every pointer of the arguments is to the vectors here.
template <class Sizes>
struct KeyScoresCase {
  static constexpr int kBlockTokens = 64;

  Sizes sizes;
  std::vector<int32_t> table, counts, slot_numbers, query_start;
  std::vector<uint8_t> queries;
  std::vector<float> scores;

  int all_blocks() const { return sizes.slots * sizes.kv_heads * sizes.blocks; }
  int width() const { return sizes.blocks + 1; }
  int tokens() const { return sizes.slots * sizes.rows; }
  int query_heads() const { return sizes.kv_heads * sizes.group; }
  int64_t score_stride() const { return int64_t{width()} * kBlockTokens; }

 protected:
  // One number in so many is that much larger.
  void draw_queries(std::mt19937& random, int one_in, float times) {
    std::normal_distribution<float> normal;
    const int64_t elements = int64_t{tokens()} * query_heads() * sizes.head_dim;
    queries.resize(static_cast<size_t>(elements) * byte_size(sizes.dtype));
    for (int64_t i = 0; i < elements; ++i) {
      write_element(sizes.dtype, queries, i, normal(random) * (pick(random, 0, one_in) == 0 ? times : 1));
    }
    scores.assign(static_cast<size_t>(tokens() * query_heads() * score_stride()), NAN);
  }

  // Numbers all blocks, [slot, head, block], in random order; the table of the last slot has half of its blocks.
  std::vector<int32_t> place_blocks(std::mt19937& random) {
    std::vector<int32_t> order(static_cast<size_t>(all_blocks()));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    table.assign(static_cast<size_t>(sizes.slots * sizes.kv_heads * width()), -1);
    for (int slot = 0; slot < sizes.slots; ++slot) {
      slot_numbers.push_back(sizes.slots - 1 - slot);
      query_start.push_back(slot * sizes.rows);
      for (int head = 0; head < sizes.kv_heads; ++head) {
        const int row = slot * sizes.kv_heads + head;
        const int held = slot == sizes.slots - 1 ? sizes.blocks / 2 : sizes.blocks;
        counts.push_back(held * kBlockTokens);
        std::copy_n(order.begin() + row * sizes.blocks, held, table.begin() + row * width());
      }
    }
    query_start.push_back(tokens());
    return order;
  }

  void describe(KeyScoresArguments& a) {
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
  }

  // How many scores are wrong, and how many were written of tokens that there are not. `row_check(query, slot, head)` makes
  // the check of a row: whether a product of the query with a key of the slot's head is wrong, by the key's token.
  template <class RowCheck>
  int64_t count_wrong(RowCheck&& row_check) const {
    int64_t wrong = 0;
    const double scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
    for (int row = 0; row < tokens() * query_heads(); ++row) {
      const int slot = slot_numbers[static_cast<size_t>(row / query_heads() / sizes.rows)];
      const int head = row % query_heads() / sizes.group;
      const auto is_wrong = row_check(read_elements(sizes.dtype, queries, int64_t{row} * sizes.head_dim, sizes.head_dim), slot, head);
      const int held = counts[static_cast<size_t>(slot * sizes.kv_heads + head)];
      for (int token = 0; token < width() * kBlockTokens; ++token) {
        const double score = scores[static_cast<size_t>(row * score_stride() + token)];
        wrong += token < held ? is_wrong(token, score / scale) : !std::isnan(score);
      }
    }
    return wrong;
  }
};

}  // namespace kv
