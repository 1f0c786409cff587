// Compression and the attention over what it leaves, against the oracle on the cache written out.
#include "kernels/compress-24/compress-24.h"
#include "kernels/decode-attention-24/decode-attention-24.h"
#include "kernels/decompress-24/decompress-24.h"
#include "shared/memory-streams/memory-streams.h"
#include "tests/attention-checks.h"
#include "tests/prefill-builds.h"

namespace kv {
namespace {

using Attention24 = Status (*)(const Attention24Arguments&, ExecutionContext&);

// One operand of a case: its index map, and its sparse blocks, which the case's pool holds written out as well, so that
// the case's oracle knows them.
struct Operand24 {
  std::vector<int32_t> table;
  std::vector<uint16_t> non_zeros;
  std::vector<uint32_t> metadata;
  int32_t block_count = 0;

  // Makes a random number of the first full blocks of every head sparse.
  Operand24(AttentionCase& attention, KvOperand operand, std::mt19937& random, ExecutionContext& context) {
    const PagedAttentionArguments& a = attention.arguments;
    std::vector<uint8_t>& pool = operand == KvOperand::keys ? attention.keys : attention.values;
    block_count = a.block_count;
    for (const int32_t block : attention.block_table) table.push_back(block);
    non_zeros.resize(static_cast<size_t>(block_count * sparse_block_elements(a.head_dim)), 0x7e00);
    metadata.resize(static_cast<size_t>(block_count * sparse_block_words(a.head_dim)), 0xffffffffu);
    std::vector<int32_t> ids(static_cast<size_t>(block_count));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<Pruning> prunings;
    int32_t next = 0;
    for (int32_t row = 0; row < a.slot_count * a.kv_heads; ++row) {
      const int32_t count = pick(random, 0, a.key_counts[row] / kBlock24Tokens);
      prunings.push_back({row, 0, count, count, next, 0});
      next += count;
    }
    Compress24Arguments c;
    c.operand = operand;
    c.dtype = a.cache_dtype;
    c.head_dim = a.head_dim;
    c.dense = pool.data();
    c.dense_block_count = a.block_count;
    c.non_zeros = non_zeros.data();
    c.metadata = metadata.data();
    c.sparse_block_count = block_count;
    c.table = table.data();
    c.table_width = a.table_width;
    c.kv_heads = a.kv_heads;
    c.slot_count = a.slot_count;
    c.prunings = prunings.data();
    c.pruning_count = static_cast<int32_t>(prunings.size());
    c.most_blocks = a.table_width;
    c.ids = ids.data();
    c.id_count = block_count;
    CHECK(compress_24(c, context).ok());
    write_out(operand, a, pool, context);
  }

  SparseBlocks24 sparse() const { return {non_zeros.data(), metadata.data(), block_count}; }

 private:
  void write_out(KvOperand operand, const PagedAttentionArguments& a, std::vector<uint8_t>& pool,
                 ExecutionContext& context) const {
    for (size_t entry = 0; entry < table.size(); ++entry) {
      if (is_dense(table[entry])) continue;
      const int32_t id = block_number(table[entry]);
      Decompress24Arguments d;
      d.operand = operand;
      d.dtype = a.cache_dtype;
      d.head_dim = a.head_dim;
      d.sparse = sparse();
      d.ids = &id;
      d.count = 1;
      const int32_t first = 0;
      d.places = &first;
      d.dense_count = 1;
      d.dense = pool.data() + a.block_table[entry] * a.block_stride * 2;
      CHECK(decompress_24(d, context).ok());
    }
  }
};

// A case whose cache has 2:4 blocks; its own pools hold them written out.
struct Case24 {
  AttentionCase attention;
  std::mt19937 random;
  const Operand24 keys, values;
  Attention24Arguments arguments;

  Case24(const AttentionShape& shape, unsigned seed, ExecutionContext& context)
      : attention(shape, seed),
        random(seed),
        keys(attention, KvOperand::keys, random, context),
        values(attention, KvOperand::values, random, context) {
    static_cast<PagedAttentionArguments&>(arguments) = attention.arguments;
    arguments.block_table = keys.table.data();
    arguments.value_table = values.table.data();
    arguments.sparse_keys = keys.sparse();
    arguments.sparse_values = values.sparse();
  }
};

// What the oracle says of a cache written out, which every instruction set compresses alike.
class Oracle24 {
 public:
  const std::vector<WantedRow>& of(const AttentionCase& attention) {
    if (attention.keys != keys_ || attention.values != values_) {
      rows_ = attention.oracle();
      keys_ = attention.keys;
      values_ = attention.values;
    }
    return rows_;
  }

 private:
  std::vector<uint8_t> keys_, values_;
  std::vector<WantedRow> rows_;
};

// `dense`, where there is one, gives the same bits on the cache written out.
void check(Attention24 attend, const AttentionShape& shape, unsigned seed, Isa isa, Oracle24& oracle,
           AttentionOperation dense = nullptr) {
  Workers workers(3);
  ExecutionContext context{workers, isa};
  Case24 test(shape, seed, context);
  AttentionCase& attention = test.attention;
  CHECK(attend(test.arguments, context).ok());
  CHECK(attention.agrees(oracle.of(attention), isa));
  if (dense == nullptr) return;
  const std::vector<uint8_t> output = attention.output;
  const std::vector<float> log_sum_exp = attention.log_sum_exp;
  run(dense, attention, workers, isa);
  CHECK(output == attention.output && log_sum_exp == attention.log_sum_exp);
}

AttentionShape shape_24(std::mt19937& random, std::initializer_list<int> queries) {
  AttentionShape shape;
  shape.kv_heads = pick(random, 1, 2);
  shape.query_heads = shape.kv_heads * pick(random, 1, 6);
  shape.head_dim = pick_from(random, {64, 128});
  shape.cache_dtype = pick_from(random, {DType::f16, DType::bf16});
  shape.query_dtype = pick_from(random, {DType::f32, DType::f16});
  const int batch = pick(random, 1, 3);
  for (int b = 0; b < batch; ++b) {
    shape.queries.push_back(pick_from(random, queries));
    for (int head = 0; head < shape.kv_heads; ++head) {
      shape.key_counts.push_back(shape.queries.back() + pick(random, 0, 300));
    }
  }
  return shape;
}

TEST("decode attention over 2:4 blocks agrees with the oracle on the cache written out") {
  for (unsigned seed = 0; seed < 12; ++seed) {
    std::mt19937 random(seed);
    const AttentionShape shape = shape_24(random, {1, 1, 2});
    Oracle24 oracle;
    on_every_isa([&](Isa isa) { check(decode_attention_24, shape, seed, isa, oracle); });
  }
}

TEST("decode attention over 2:4 blocks gives the same bits in whichever cache it asks for memory") {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int head_dim : {64, 128}) {
      std::mt19937 random(static_cast<unsigned>(head_dim));
      AttentionShape shape = shape_24(random, {1, 1, 2});
      shape.cache_dtype = dtype;
      shape.head_dim = head_dim;
      on_every_isa([&](Isa isa) {
        Workers workers(2);
        ExecutionContext context{workers, isa};
        Case24 test(shape, 9, context);
        AttentionCase& attention = test.attention;
        CHECK(decode_attention_24(test.arguments, context).ok());
        const std::vector<uint8_t> output = attention.output;
        const std::vector<float> log_sum_exp = attention.log_sum_exp;
        for (const MemoryReading& reading : kMemoryReadings) {
          attention.poison();
          workers.set_memory_reading(reading);
          CHECK(decode_attention_24(test.arguments, context).ok());
          CHECK(attention.output == output && attention.log_sum_exp == log_sum_exp);
        }
      });
    }
  }
}

TEST("2:4 prefill attention agrees with the oracle on the cache written out") {
  for (unsigned seed = 0; seed < 8; ++seed) {
    std::mt19937 random(seed);
    const AttentionShape shape = shape_24(random, {1, 9, 60, 130});
    Oracle24 oracle;
    on_every_prefill([&](const PrefillBuild& build) { check(build.blocks_24, shape, seed, build.isa, oracle, build.dense); });
  }
}

}  // namespace
}  // namespace kv
