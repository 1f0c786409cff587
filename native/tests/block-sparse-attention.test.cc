#include "tests/attention-checks.h"
#include "tests/prefill-builds.h"

namespace kv {
namespace {

// Lists for all query heads and tiles of a case, each with room for as many blocks as the longest sequence has.
struct Lists {
  std::vector<int32_t> blocks, counts;
  KeyBlockLists lists;

  template <class Listed>
  Lists(const AttentionCase& c, Listed&& listed) {
    for (const int32_t n : c.shape.queries) lists.query_tiles += query_tiles_of(n);
    const int32_t longest = *std::max_element(c.shape.key_counts.begin(), c.shape.key_counts.end());
    lists.capacity = key_block_limit(false, longest, 0, 0);
    blocks.assign(static_cast<size_t>(c.shape.query_heads * lists.query_tiles * lists.capacity), -7);
    counts.assign(static_cast<size_t>(c.shape.query_heads * lists.query_tiles), 0);
    lists.blocks = blocks.data();
    lists.counts = counts.data();
    for (int32_t head = 0; head < c.shape.query_heads; ++head) {
      int32_t tile = 0;
      for (int32_t b = 0; b < c.arguments.batch; ++b) {
        const int32_t n = c.shape.queries[static_cast<size_t>(b)];
        const int32_t keys = c.count_of(b, head / (c.shape.query_heads / c.shape.kv_heads));
        for (int32_t first = 0; first < n; first += kListedQueryTile, ++tile) {
          const auto list = static_cast<size_t>(lists.list(head, tile));
          for (int32_t block = 0; block < key_block_limit(c.shape.causal, keys, n, first); ++block) {
            if (!listed(block)) continue;
            blocks[list * static_cast<size_t>(lists.capacity) + static_cast<size_t>(counts[list]++)] = block;
          }
        }
      }
    }
  }
};

AttentionShape ragged_shape(bool causal, DType cache_dtype) {
  AttentionShape s;
  s.queries = {300, 1, 128, 70};
  s.key_counts = {300, 333, 500, 2, 128, 128, 260, 40};
  s.query_heads = 4;
  s.kv_heads = 2;
  s.head_dim = cache_dtype == DType::bf16 ? 64 : 40;
  s.cache_dtype = cache_dtype;
  s.causal = causal;
  return s;
}

void attend(AttentionCase& c, const KeyBlockLists& lists, const PrefillBuild& build) {
  c.poison();
  BlockSparseAttentionArguments arguments;
  static_cast<PagedAttentionArguments&>(arguments) = c.arguments;
  arguments.lists = lists;
  Workers workers(3);
  ExecutionContext context{workers, build.isa};
  CHECK(build.listed(arguments, context).ok());
}

// What prefill-attention gives over a table of the listed blocks alone, bit for bit.
void check_equals_dense_of_listed_blocks(const PrefillBuild& build, DType dtype) {
  AttentionCase sparse(ragged_shape(false, dtype), 3);
  const auto every_other = [](int32_t block) { return block % 2 == 0; };
  attend(sparse, Lists(sparse, every_other).lists, build);

  AttentionCase dense(ragged_shape(false, dtype), 3);
  for (int32_t b = 0; b < dense.arguments.batch; ++b) {
    for (int32_t head = 0; head < dense.shape.kv_heads; ++head) {
      const int32_t cache_head = dense.slots[static_cast<size_t>(b)] * dense.shape.kv_heads + head;
      const auto table = dense.block_table.begin() + cache_head * dense.arguments.table_width;
      int32_t keys = 0;
      for (int32_t block = 0; block * kKeyBlockTokens < dense.count_of(b, head); block += 2) {
        table[block / 2] = table[block];
        keys += std::min(kKeyBlockTokens, dense.count_of(b, head) - block * kKeyBlockTokens);
      }
      dense.count_of(b, head) = keys;
    }
  }
  Workers workers(1);
  run(build.dense, dense, workers, build.isa);
  CHECK(same_results(sparse, dense));
}

}  // namespace

TEST("block-sparse-attention of all blocks gives the bits of prefill-attention") {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const bool causal : {true, false}) {
      AttentionCase sparse(ragged_shape(causal, dtype), 4);
      AttentionCase dense(ragged_shape(causal, dtype), 4);
      const Lists all(sparse, [](int32_t) { return true; });
      on_every_prefill([&](const PrefillBuild& build) {
        attend(sparse, all.lists, build);
        Workers workers(2);
        run(build.dense, dense, workers, build.isa);
        CHECK(same_results(sparse, dense));
      });
    }
  }
}

TEST("block-sparse-attention attends to the listed blocks alone") {
  on_every_prefill([](const PrefillBuild& build) {
    for (const DType dtype : {DType::f16, DType::bf16}) check_equals_dense_of_listed_blocks(build, dtype);
  });
}

}  // namespace kv
