#include "kernels/append-kv/append-kv.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {
namespace {

// A cache of one layer, and new rows for it. Every byte that append_kv must not touch is 0xff.
struct AppendCase {
  DType row_dtype;
  DType cache_dtype;
  int32_t kv_heads = 3;
  int32_t head_dim;
  int32_t block_tokens;
  std::vector<int32_t> query_start, slots, counts, table;
  std::vector<uint8_t> keys, values, key_pool, value_pool;
  AppendKvArguments arguments;

  AppendCase(const AppendCase&) = delete;
  AppendCase& operator=(const AppendCase&) = delete;

  explicit AppendCase(unsigned seed) {
    std::mt19937 random(seed);
    row_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
    cache_dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
    head_dim = pick_from(random, {1, 7, 64, 80, 129});
    block_tokens = pick_from(random, {1, 5, 64});
    const int32_t batch = pick(random, 1, 3);
    query_start.assign(1, 0);
    for (int32_t b = 0; b < batch; ++b) {
      query_start.push_back(query_start.back() + pick(random, 0, 70));
      slots.push_back(batch - 1 - b);
    }
    AppendKvArguments& a = arguments;
    a.batch = batch;
    a.kv_heads = kv_heads;
    a.head_dim = head_dim;
    a.row_dtype = row_dtype;
    a.cache_dtype = cache_dtype;
    a.block_tokens = block_tokens;
    a.table_width = 100 / block_tokens + 1;
    for (int32_t i = 0; i < batch * kv_heads; ++i) counts.push_back(pick(random, 0, 30));
    table.resize(static_cast<size_t>(batch * kv_heads * a.table_width));
    a.block_count = static_cast<int32_t>(table.size());
    a.slot_count = batch;
    a.query_tokens = query_start.back();
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    a.row_head_stride = head_dim + 1;
    a.row_token_stride = kv_heads * a.row_head_stride + 2;
    a.token_stride = head_dim + 3;
    a.block_stride = block_tokens * a.token_stride + 4;
    for (std::vector<uint8_t>* rows : {&keys, &values}) {
      const int64_t elements = query_start.back() * a.row_token_stride;
      rows->resize(static_cast<size_t>(elements) * byte_size(row_dtype));
      std::normal_distribution<float> normal;
      for (int64_t i = 0; i < elements; ++i) write_element(row_dtype, *rows, i, normal(random));
    }
    for (std::vector<uint8_t>* pool : {&key_pool, &value_pool}) {
      pool->assign(table.size() * static_cast<size_t>(a.block_stride) * byte_size(cache_dtype), 0xff);
    }
    a.keys = keys.data();
    a.values = values.data();
    a.key_pool = key_pool.data();
    a.value_pool = value_pool.data();
    a.block_table = table.data();
    a.key_counts = counts.data();
    a.slots = slots.data();
    a.query_start = query_start.data();
  }

  // What the pool and the counts must be afterwards, one element at a time.
  void expect(std::vector<uint8_t>& expected_keys, std::vector<uint8_t>& expected_values,
              std::vector<int32_t>& expected_counts) const {
    const AppendKvArguments& a = arguments;
    for (int32_t b = 0; b < a.batch; ++b) {
      for (int32_t token = query_start[static_cast<size_t>(b)];
           token < query_start[static_cast<size_t>(b) + 1]; ++token) {
        for (int32_t head = 0; head < kv_heads; ++head) {
          const int32_t cache_head = slots[static_cast<size_t>(b)] * kv_heads + head;
          const int32_t at = expected_counts[static_cast<size_t>(cache_head)]++;
          const int32_t block = table[static_cast<size_t>(cache_head * a.table_width + at / block_tokens)];
          for (int32_t d = 0; d < head_dim; ++d) {
            const int64_t from = token * a.row_token_stride + head * a.row_head_stride + d;
            const int64_t to = block * a.block_stride + at % block_tokens * a.token_stride + d;
            write_element(cache_dtype, expected_keys, to, read_element(row_dtype, keys, from));
            write_element(cache_dtype, expected_values, to, read_element(row_dtype, values, from));
          }
        }
      }
    }
  }
};

void check_random_cases(Isa isa) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    AppendCase c(seed);
    std::vector<uint8_t> expected_keys = c.key_pool;
    std::vector<uint8_t> expected_values = c.value_pool;
    std::vector<int32_t> expected_counts = c.counts;
    c.expect(expected_keys, expected_values, expected_counts);
    Workers workers(1 + static_cast<int>(seed % 3));
    ExecutionContext context{workers, isa};
    CHECK(append_kv(c.arguments, context).ok());
    CHECK(c.key_pool == expected_keys && c.value_pool == expected_values);
    CHECK(c.counts == expected_counts);
  }
}

// Ties go to the even neighbour, overflow to infinity, and a NaN stays one.
void check_rounding(Isa isa) {
  const float cases[] = {1 + 0x1p-11f, 1 + 0x3p-11f, 65520.0f,    0x1p-25f,
                         0x3p-25f,     1 + 0x1p-8f,  1 + 0x3p-8f, std::numeric_limits<float>::quiet_NaN()};
  const uint16_t halves[] = {0x3c00, 0x3c02, 0x7c00, 0x0000, 0x0002, 0x3c04, 0x3c0c, 0};
  const uint16_t bfloats[] = {0x3f80, 0x3f80, 0x4780, 0x3300, 0x33c0, 0x3f80, 0x3f82, 0};
  for (const DType dtype : {DType::f16, DType::bf16}) {
    // Twice, so that both whole vectors and the remainder are met.
    float rows[24];
    uint16_t keys[24];
    uint16_t values[24];
    for (int i = 0; i < 24; ++i) rows[i] = cases[i % 8];
    int32_t count = 0;
    const int32_t block = 0;
    const int32_t slot = 0;
    const int32_t query_start[] = {0, 1};
    AppendKvArguments a;
    a.keys = a.values = rows;
    a.row_token_stride = a.row_head_stride = a.token_stride = a.block_stride = a.head_dim = 24;
    a.key_pool = keys;
    a.value_pool = values;
    a.cache_dtype = dtype;
    a.block_tokens = a.table_width = a.block_count = a.slot_count = 1;
    a.batch = a.kv_heads = a.query_tokens = 1;
    a.block_table = &block;
    a.key_counts = &count;
    a.slots = &slot;
    a.query_start = query_start;
    Workers workers(1);
    ExecutionContext context{workers, isa};
    CHECK(append_kv(a, context).ok());
    for (int i = 0; i < 24; ++i) {
      const uint16_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
      // Not `(f16 ? halves : bfloats)[i]`: GCC 12 with AddressSanitizer reads the wrong array.
      const uint16_t* expected = dtype == DType::f16 ? halves : bfloats;
      const bool right = i % 8 == 7 ? (keys[i] & 0x7fff) > infinity : keys[i] == expected[i % 8];
      CHECK(right && keys[i] == values[i]);
    }
  }
}

void check_refusals() {
  Workers workers(1);
  ExecutionContext context{workers, best_isa()};
  const auto refused = [&](auto change) {
    AppendCase c(2);
    change(c);
    const std::vector<int32_t> counts = c.counts;
    const std::vector<uint8_t> key_pool = c.key_pool;
    const Status status = append_kv(c.arguments, context);
    return !status.ok() && !status.message.empty() && c.counts == counts && c.key_pool == key_pool;
  };
  CHECK(AppendCase(2).query_start.back() > 0);
  CHECK(refused([](AppendCase& c) { c.counts[0] = c.arguments.table_width * c.block_tokens; }));
  CHECK(refused([](AppendCase& c) { c.counts.back() = -1; }));
  CHECK(refused([](AppendCase& c) { std::fill(c.table.begin(), c.table.end(), -1); }));
  CHECK(refused([](AppendCase& c) { c.slots.back() = 7; }));
  CHECK(refused([](AppendCase& c) { c.arguments.cache_dtype = DType::i8; }));
  CHECK(refused([](AppendCase& c) { c.arguments.row_dtype = DType::i8; }));
  CHECK(refused([](AppendCase& c) { c.arguments.head_dim = 0; }));
}

}  // namespace

TEST("append-kv writes and counts new rows, and touches nothing else") {
  on_every_isa([](Isa isa) {
    check_random_cases(isa);
    check_rounding(isa);
  });
}

TEST("append-kv refuses what does not fit, before it writes") { check_refusals(); }

}  // namespace kv
