#include "kernels/gather-kv/gather-kv.h"

#include <algorithm>
#include <numeric>

#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {
namespace {

// One slot whose elements tell where they were; a gap between rows belongs to nobody.
struct GatherCase {
  int32_t kv_heads, block_tokens, width = 5, gap;
  std::vector<uint16_t> keys, values;
  std::vector<int32_t> table, key_counts, indices, counts;
  GatherKvArguments arguments;

  GatherCase(const GatherCase&) = delete;
  GatherCase& operator=(const GatherCase&) = delete;

  explicit GatherCase(unsigned seed) {
    std::mt19937 random(seed);
    kv_heads = pick(random, 1, 4);
    block_tokens = pick_from(random, {1, 7, 64});
    gap = pick_from(random, {0, 0, 3});
    GatherKvArguments& a = arguments;
    a.cache_dtype = DType::f16;
    a.head_dim = pick_from(random, {1, 5, 64});
    a.token_stride = a.head_dim + gap;
    a.block_stride = block_tokens * a.token_stride + gap;
    a.block_tokens = block_tokens;
    a.table_width = width;
    a.kv_heads = kv_heads;
    table.resize(static_cast<size_t>(kv_heads * width));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    keys.resize(table.size() * static_cast<size_t>(a.block_stride));
    std::iota(keys.begin(), keys.end(), uint16_t{0});
    values = keys;
    for (uint16_t& value : values) value = static_cast<uint16_t>(value ^ 0x5555);
    a.index_stride = width * block_tokens;
    indices.assign(static_cast<size_t>(kv_heads * a.index_stride), -1);
    for (int32_t head = 0; head < kv_heads; ++head) {
      key_counts.push_back(pick(random, 0, width * block_tokens));
      // Runs of kept tokens between runs of dropped ones.
      int32_t kept = 0;
      bool keeps = pick(random, 0, 1) == 1;
      for (int32_t token = 0; token < key_counts.back(); ++token) {
        if (pick(random, 0, 9) == 0) keeps = !keeps;
        if (keeps) indices[static_cast<size_t>(head * a.index_stride + kept++)] = token;
      }
      counts.push_back(kept);
    }
    a.key_pool = keys.data();
    a.value_pool = values.data();
    a.block_count = kv_heads * width;
    a.block_table = table.data();
    a.key_counts = key_counts.data();
    a.indices = indices.data();
    a.counts = counts.data();
  }

  size_t place(int32_t head, int32_t token) const {
    const int32_t block = table[static_cast<size_t>(head * width + token / block_tokens)];
    const int64_t row = token % block_tokens * arguments.token_stride;
    return static_cast<size_t>(block * arguments.block_stride + row);
  }

  std::vector<uint16_t> expected(const std::vector<uint16_t>& pool) const {
    std::vector<uint16_t> moved = pool;
    for (int32_t head = 0; head < kv_heads; ++head) {
      for (int32_t i = 0; i < counts[static_cast<size_t>(head)]; ++i) {
        const size_t from = place(head, indices[static_cast<size_t>(head * arguments.index_stride + i)]);
        std::copy_n(pool.begin() + static_cast<int64_t>(from), arguments.head_dim,
                    moved.begin() + static_cast<int64_t>(place(head, i)));
      }
    }
    return moved;
  }
};

}  // namespace

TEST("gather-kv moves runs of any length to the front, and touches nothing else") {
  on_every_isa([](Isa isa) {
    for (unsigned seed = 0; seed < 100; ++seed) {
      GatherCase c(seed);
      const std::vector<uint16_t> expected_keys = c.expected(c.keys);
      const std::vector<uint16_t> expected_values = c.expected(c.values);
      Workers workers(1 + static_cast<int>(seed % 3));
      ExecutionContext context{workers, isa};
      CHECK(gather_kv(c.arguments, context).ok());
      CHECK(c.keys == expected_keys && c.values == expected_values);
      CHECK(c.key_counts == c.counts);
    }
  });
}

TEST("gather-kv refuses indices that do not ascend or are not held, before it moves anything") {
  for (const int32_t wrong : {-1, 2, 6}) {
    GatherCase c(4);
    c.key_counts[0] = 5;
    c.counts[0] = 3;
    std::copy_n(std::vector<int32_t>{0, 2, wrong}.begin(), 3, c.indices.begin());
    const std::vector<uint16_t> keys = c.keys;
    Workers workers(1);
    ExecutionContext context{workers, best_isa()};
    CHECK(!gather_kv(c.arguments, context).ok());
    CHECK(c.keys == keys);
  }
}

}  // namespace kv
