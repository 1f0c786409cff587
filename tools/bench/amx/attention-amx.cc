// Prompt attention over a cache in bf16 on tile registers beside AVX-512, in turn: a chunk of f32 rows behind a prefix,
// causal. Prints a line of JSON for each case: the milliseconds of both. For run.mjs:
//
//   attention-amx THREADS ROWS SAMPLES
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "beside-avx512.h"
#include "kernels/block-sparse-attention/block-sparse-attention.h"
#include "kernels/compress-24/compress-24.h"
#include "kernels/prefill-attention-24/prefill-attention-24.h"
#include "kernels/prefill-attention/prefill-attention.h"

namespace {

constexpr int32_t kBlockTokens = 64, kListedShare = 4;
// Query heads, cache heads and dims.
constexpr int32_t kHeads[][3] = {{32, 4, 64}, {32, 8, 64}, {32, 8, 128}};
constexpr int32_t kKeys[] = {512, 4096, 16384};

// Like a normal number: the sum of four.
float random_number() {
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<float>(random_bits() >> 40) * 0x1p-24f - 0.5f;
  }
  return sum * 1.7f;
}

void fill(std::vector<uint16_t>& numbers) {
  for (uint16_t& x : numbers) {
    const float number = random_number();
    uint32_t word;
    std::memcpy(&word, &number, sizeof word);
    x = static_cast<uint16_t>(word >> 16);
  }
}

// One sequence in a cache, dense and with all full blocks 2:4, and lists of a quarter of its blocks of keys.
struct Case {
  kv::PagedAttentionArguments dense;
  kv::Attention24Arguments blocks_24;
  kv::BlockSparseAttentionArguments listed;
  std::vector<float> query, output;
  std::vector<uint16_t> keys, values, sparse_keys, sparse_values;
  std::vector<uint32_t> key_metadata, value_metadata;
  std::vector<int32_t> table, key_table, value_table, counts, lists, list_counts;
  int32_t query_start[2] = {0, 0}, slot = 0;

  Case(const int32_t (&heads)[3], int32_t rows, int32_t key_count, kv::Workers& workers) {
    const auto [query_heads, kv_heads, dim] = heads;
    const int32_t width = key_count / kBlockTokens, blocks = kv_heads * width;
    query.resize(static_cast<size_t>(rows * query_heads * dim));
    for (float& x : query) x = random_number();
    output.resize(query.size());
    keys.resize(static_cast<size_t>(blocks * kBlockTokens * dim));
    values.resize(keys.size());
    fill(keys);
    fill(values);
    counts.assign(static_cast<size_t>(kv_heads), key_count);
    table.resize(static_cast<size_t>(blocks));
    std::iota(table.begin(), table.end(), 0);
    dense.batch = dense.slot_count = 1;
    dense.query_heads = query_heads;
    dense.kv_heads = kv_heads;
    dense.head_dim = dim;
    dense.causal = true;
    dense.scale = dim == 64 ? 0.125f : 0.08838835f;
    dense.cache_dtype = kv::DType::bf16;
    dense.query_tokens = query_start[1] = rows;
    dense.query_head_stride = dense.output_head_stride = dim;
    dense.query_token_stride = dense.output_token_stride = query_heads * dim;
    dense.block_tokens = kBlockTokens;
    dense.table_width = width;
    dense.token_stride = dim;
    dense.block_stride = kBlockTokens * dim;
    dense.block_count = blocks;
    dense.query = query.data();
    dense.output = output.data();
    dense.keys = keys.data();
    dense.values = values.data();
    dense.block_table = table.data();
    dense.key_counts = counts.data();
    dense.slots = &slot;
    dense.query_start = query_start;
    prune(workers);
    list();
  }

  void prune(kv::Workers& workers) {
    static_cast<kv::PagedAttentionArguments&>(blocks_24) = dense;
    key_table = value_table = table;
    blocks_24.block_table = key_table.data();
    blocks_24.value_table = value_table.data();
    blocks_24.sparse_keys = compress(kv::KvOperand::keys, keys, key_table, sparse_keys, key_metadata, workers);
    blocks_24.sparse_values = compress(kv::KvOperand::values, values, value_table, sparse_values, value_metadata, workers);
  }

  kv::SparseBlocks24 compress(kv::KvOperand operand, std::vector<uint16_t>& pool, std::vector<int32_t>& entries,
                              std::vector<uint16_t>& non_zeros, std::vector<uint32_t>& metadata, kv::Workers& workers) {
    non_zeros.resize(table.size() * static_cast<size_t>(kv::sparse_block_elements(dense.head_dim)));
    metadata.resize(table.size() * static_cast<size_t>(kv::sparse_block_words(dense.head_dim)));
    std::vector<kv::Pruning> prunings;
    for (int32_t head = 0; head < dense.kv_heads; ++head) {
      prunings.push_back({head, 0, dense.table_width, dense.table_width, head * dense.table_width, 0});
    }
    kv::Compress24Arguments c;
    c.operand = operand;
    c.dtype = dense.cache_dtype;
    c.head_dim = dense.head_dim;
    c.dense = pool.data();
    c.dense_block_count = c.sparse_block_count = c.id_count = dense.block_count;
    c.non_zeros = non_zeros.data();
    c.metadata = metadata.data();
    c.table = entries.data();
    c.table_width = c.most_blocks = dense.table_width;
    c.kv_heads = dense.kv_heads;
    c.slot_count = 1;
    c.prunings = prunings.data();
    c.pruning_count = static_cast<int32_t>(prunings.size());
    c.ids = table.data();
    kv::ExecutionContext context{workers, kv::Isa::avx512};
    if (!kv::compress_24(c, context).ok()) std::abort();
    return {non_zeros.data(), metadata.data(), dense.block_count};
  }

  void list() {
    static_cast<kv::PagedAttentionArguments&>(listed) = dense;
    listed.lists.query_tiles = kv::query_tiles_of(dense.query_tokens);
    listed.lists.capacity = dense.table_width;
    list_counts.assign(static_cast<size_t>(dense.query_heads * listed.lists.query_tiles), 0);
    lists.resize(list_counts.size() * static_cast<size_t>(listed.lists.capacity));
    for (int32_t head = 0; head < dense.query_heads; ++head) {
      for (int32_t tile = 0; tile < listed.lists.query_tiles; ++tile) {
        const auto at = static_cast<size_t>(listed.lists.list(head, tile));
        const int32_t limit = kv::key_block_limit(true, counts[0], dense.query_tokens, tile * kv::kListedQueryTile);
        for (int32_t block = head % kListedShare; block < limit; block += kListedShare) {
          lists[at * static_cast<size_t>(listed.lists.capacity) + static_cast<size_t>(list_counts[at]++)] = block;
        }
      }
    }
    listed.lists.blocks = lists.data();
    listed.lists.counts = list_counts.data();
  }
};

using Operation = std::function<kv::Status(kv::ExecutionContext&)>;

void time_operation(const char* blocks, const Case& c, int32_t keys, kv::Workers& workers, int samples, const Operation& operation) {
  std::printf("{\"blocks\": \"%s\", \"rows\": %d, \"keys\": %d, \"queryHeads\": %d, \"kvHeads\": %d, \"headDim\": %d, \"dtype\": \"bf16\", \"threads\": %d",
              blocks, c.dense.query_tokens, keys, c.dense.query_heads, c.dense.kv_heads, c.dense.head_dim, workers.count());
  print_beside_avx512(workers, 1, samples, [] {}, operation);
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  expect_amx();
  kv::Workers workers(std::atoi(words[1]));
  const int rows = std::atoi(words[2]), samples = std::atoi(words[3]);
  for (const auto& heads : kHeads) {
    for (const int32_t keys : kKeys) {
      Case c(heads, rows, keys, workers);
      const auto time = [&](const char* blocks, const Operation& operation) {
        time_operation(blocks, c, keys, workers, samples, operation);
      };
      time("dense", [&](kv::ExecutionContext& context) { return kv::prefill_attention(c.dense, context); });
      time("2:4", [&](kv::ExecutionContext& context) { return kv::prefill_attention_24(c.blocks_24, context); });
      time("listed", [&](kv::ExecutionContext& context) { return kv::block_sparse_attention(c.listed, context); });
    }
  }
}
