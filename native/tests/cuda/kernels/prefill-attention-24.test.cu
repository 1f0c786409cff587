// Prefill attention over dense and 2:4 blocks against float64: random inputs and random 2:4 masks, NaN in every cache
// row that holds no key and in every unused block, poisoned outputs.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/prefill-attention-24/prefill-attention-24.cuda.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/blocks-24/blocks-24.cuda.h"
#include "tests/cuda/kernels/attention-reference.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"

namespace kv::tests {
namespace {

struct Case : AttentionCase {
  double sparse_keys = 0.5;  // share of the full blocks
  double sparse_values = 0.5;
  bool exact = false;  // small integers, for which all sums are exact: dense and sparse storage agree bit for bit
};

// The keys or the values of a cache with 2:4 blocks: what kernels read, and the same as a plain cache.
template <typename Element>
struct Operand {
  KvOperand kind;
  int head_dim;
  std::vector<Element> plain, dense, non_zeros;
  std::vector<uint32_t> metadata;
  std::vector<int> table, dense_ids, sparse_ids;

  Operand(KvOperand kind, int head_dim, int blocks, size_t table_size, Random& random)
      : kind(kind), head_dim(head_dim), table(table_size, kNoBlock), dense_ids(shuffled(blocks, random)),
        sparse_ids(shuffled(blocks, random)) {
    const Element nan = Element(NAN);
    plain.assign(size_t(blocks) * kBlock24Tokens * head_dim, nan);
    dense = plain;
    non_zeros.assign(plain.size() / 2, nan);
    metadata.assign(blocks * sparse_block_words(head_dim), 0x44444444);
  }

  // Stores a block of the plain cache. A sparse one loses, with its places in `plain`, two random elements of four.
  void store(int block, size_t table_entry, bool sparse, Random& random) {
    const size_t first = size_t(block) * kBlock24Tokens * head_dim;
    if (!sparse) {
      const int id = dense_ids[block];
      std::copy_n(&plain[first], kBlock24Tokens * head_dim, &dense[size_t(id) * kBlock24Tokens * head_dim]);
      table[table_entry] = id;
      return;
    }
    const int id = sparse_ids[block];
    table[table_entry] = block_entry(BlockKind::sparse_24, id);
    std::fill_n(&metadata[id * sparse_block_words(head_dim)], sparse_block_words(head_dim), 0);
    const bool keys = kind == KvOperand::keys;
    const int lines = keys ? kBlock24Tokens : head_dim;  // along which four neighbours lie
    const int neighbours = keys ? head_dim : kBlock24Tokens;
    for (int line = 0; line < lines; ++line) {
      for (int four = 0; four < neighbours / 4; ++four) {
        int kept[2] = {int(random() % 4), int(random() % 3)};
        kept[1] += kept[1] >= kept[0];
        std::sort(kept, kept + 2);
        for (int i = 0; i < 4; ++i) {
          Element& element = plain[first + (keys ? line * head_dim + 4 * four + i : (4 * four + i) * head_dim + line)];
          const int place = i == kept[0] ? 0 : i == kept[1] ? 1 : -1;
          if (place < 0) {
            element = Element(0.0f);
            continue;
          }
          const int at = keys ? key_non_zero(line, 2 * four + place, head_dim)
                              : value_non_zero(2 * four + place, line);
          non_zeros[id * sparse_block_elements(head_dim) + at] = element;
        }
        const Meta16Place place =
            keys ? key_meta16(line, four / 4, head_dim) : value_meta16(line, four / 4);
        metadata[id * sparse_block_words(head_dim) + place.word] |=
            uint32_t(kept[1] << 2 | kept[0]) << (place.shift + four % 4 * 4);
      }
    }
  }
};

template <typename Element>
std::vector<Element> small_integer_query(const Case& test, int rows, Random& random) {
  std::vector<Element> query(static_cast<size_t>(rows) * test.query_heads * test.head_dim, Element(0.0f));
  for (size_t i = 0; i < query.size(); i += test.head_dim) {
    // Two dims, so that weights differ by few powers of two.
    for (int j = 0; j < 2; ++j) query[i + random() % test.head_dim] = Element(1.0f);
  }
  return query;
}

template <typename Element>
Outcome attend(const Case& test, Random& random) {
  std::normal_distribution<float> normal;
  const auto draw = [&](float factor) {
    return Element(test.exact ? float(int(random() % 5) - 2) : normal(random) * factor);
  };
  const BatchLayout layout(test);
  std::vector<int> plain_table(layout.table_size(), kNoBlock);
  Operand<Element> keys(KvOperand::keys, test.head_dim, layout.block_count, layout.table_size(), random);
  Operand<Element> values(KvOperand::values, test.head_dim, layout.block_count, layout.table_size(), random);
  int block = 0;
  for (size_t cache_head = 0; cache_head < layout.counts.size(); ++cache_head) {
    for (int first = 0; first < layout.counts[cache_head]; first += kBlock24Tokens, ++block) {
      const int tokens = std::min(kBlock24Tokens, layout.counts[cache_head] - first);
      for (int i = 0; i < tokens * test.head_dim; ++i) {
        const size_t at = size_t(block) * kBlock24Tokens * test.head_dim + i;
        keys.plain[at] = draw(test.growth > 0 ? test.growth * (first + i / test.head_dim) : 1.0f);
        values.plain[at] = draw(1.0f);
        if (test.shift_scores && i % test.head_dim == 0) keys.plain[at] = Element(kLargeElement);
      }
      const size_t entry = cache_head * layout.table_width + first / kBlock24Tokens;
      const bool full = tokens == kBlock24Tokens;
      const auto chance = [&](double share) { return full && random() % 1000 < share * 1000; };
      keys.store(block, entry, chance(test.sparse_keys), random);
      values.store(block, entry, chance(test.sparse_values), random);
      plain_table[entry] = block;
    }
  }

  const AttentionOperands<Element> operands(test, layout,
                                            test.exact ? small_integer_query<Element>(test, layout.rows, random)
                                                       : random_query<Element>(test, layout.rows, random));
  const DeviceBuffer<Element> plain_keys(keys.plain), plain_values(values.plain), dense_keys(keys.dense),
      dense_values(values.dense), non_zero_keys(keys.non_zeros), non_zero_values(values.non_zeros);
  const DeviceBuffer<uint32_t> key_metadata(keys.metadata), value_metadata(values.metadata);
  const DeviceBuffer<int> plain_table_buffer(plain_table), key_table(keys.table), value_table(values.table);
  Attention24Arguments arguments;
  static_cast<PagedAttentionArguments&>(arguments) = operands.arguments();
  arguments.keys = dense_keys.get();
  arguments.values = dense_values.get();
  arguments.block_table = key_table.get();
  arguments.value_table = value_table.get();
  // With small integers, powers of two for weights.
  if (test.exact) arguments.scale = 0.693147182f;
  arguments.sparse_keys = {non_zero_keys.get(), key_metadata.get(), layout.block_count};
  arguments.sparse_values = {non_zero_values.get(), value_metadata.get(), layout.block_count};

  const DeviceBuffer<unsigned char> workspace(kPrefill24WorkspaceBytes, 0x5a);
  const auto launch = [&] {
    return test.ampere ? sm80::prefill_attention_24(arguments, nullptr)
                       : sm90a::prefill_attention_24(arguments, workspace.get(), nullptr);
  };
  const bool same = operands.repeats(launch);
  const auto mixed_output = operands.output.host();

  PagedAttentionArguments plain = arguments;
  plain.keys = plain_keys.get();
  plain.values = plain_values.get();
  plain.block_table = plain_table_buffer.get();
  Outcome outcome = compare_with_reference(plain, layout.most_keys(), operands);
  outcome.expect(same, "two launches differ");
  if (test.sparse_keys + test.sparse_values == 0.0) {
    const auto attend_plainly = [&](const PagedAttentionArguments& dense, const int32_t* value_table) {
      succeeds(test.ampere ? sm80::prefill_attention(dense, value_table, nullptr)
                           : sm90a::prefill_attention(dense, value_table, workspace.get(), nullptr));
      succeeds(cudaDeviceSynchronize());
      return operands.output.host();
    };
    const bool same_bits = attend_plainly(arguments, arguments.value_table) ==
                           attend_plainly(plain, plain.block_table);
    outcome.expect(same_bits, "differs from a plain cache");
  }
  if (test.exact) {
    arguments.keys = plain_keys.get();
    arguments.values = plain_values.get();
    arguments.block_table = arguments.value_table = plain_table_buffer.get();
    succeeds(launch());
    succeeds(cudaDeviceSynchronize());
    outcome.expect(operands.output.host() == mixed_output, "differs from dense storage of the same");
    succeeds(sm80::prefill_attention_24(arguments, nullptr));
    succeeds(cudaDeviceSynchronize());
    outcome.expect(operands.output.host() == mixed_output, "differs from the kernel of Ampere");
  }
  return outcome;
}

std::vector<Case> drawn_prefill_cases() {
  CaseList<Case> list(true);
  list.add("small", small_prompts());
  list.add("small, all keys", small_prompts(), [](Case& test) { test.causal = false; });
  if (only_small_cases()) return list.cases;
  const std::vector<Sequence> ragged = ragged_prompts();
  for (const double sparse_keys : {0.0, 0.5, 1.0}) {
    for (const double sparse_values : {0.0, 0.5, 1.0}) {
      const std::string name = "ragged, sparse keys " + std::to_string(sparse_keys).substr(0, 3) + ", values " +
                               std::to_string(sparse_values).substr(0, 3);
      const auto shares = [=](Case& test) {
        test.sparse_keys = sparse_keys;
        test.sparse_values = sparse_values;
      };
      list.add(name, ragged, shares);
      list.add("small integers" + name.substr(6), {{300, 300}, {100, 720}}, [=](Case& test) {
        shares(test);
        test.exact = true;
      });
    }
  }
  list.add("ragged, all keys", ragged, [](Case& test) { test.causal = false; });
  for (const int group : {1, 3, 8, 16}) {
    list.add(std::to_string(group) + " heads a group", ragged, [=](Case& test) { test.query_heads = 2 * group; });
  }
  add_unusual_prompts(list);
  return list.cases;
}

}  // namespace

TEST("prefill-attention-24 agrees with float64") {
  run_cases(drawn_prefill_cases(), [](const Case& test, Random& random) {
    return with_16_bit_type(test.dtype, [&](auto element) { return attend<decltype(element)>(test, random); });
  });
}

}  // namespace kv::tests

// For torch-prefill-24.py. `sizes`: kernel (0 for sm_90a, 1 for sm_80), rows, batch, query heads, kv heads, head
// dim, table width, causal, bf16, dense blocks, sparse blocks. `pointers`: query, output, dense keys, dense values,
// non-zeros and metadata of keys, of values, table of keys, of values, counts, slots, query start, workspace. Tensors
// are contiguous. Returns 0, or prints why not.
KV_FOR_PYTHON int kv_prefill_24(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::Attention24Arguments arguments;
  arguments.query_tokens = static_cast<int32_t>(sizes[1]);
  arguments.batch = arguments.slot_count = static_cast<int32_t>(sizes[2]);
  arguments.query_heads = static_cast<int32_t>(sizes[3]);
  arguments.kv_heads = static_cast<int32_t>(sizes[4]);
  arguments.head_dim = static_cast<int32_t>(sizes[5]);
  arguments.table_width = static_cast<int32_t>(sizes[6]);
  arguments.causal = sizes[7] != 0;
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype =
      sizes[8] ? kv::DType::bf16 : kv::DType::f16;
  arguments.block_count = static_cast<int32_t>(sizes[9]);
  const int32_t sparse_blocks = static_cast<int32_t>(sizes[10]);
  arguments.block_tokens = kv::kBlock24Tokens;
  arguments.query_token_stride = arguments.output_token_stride = sizes[3] * sizes[5];
  arguments.query_head_stride = arguments.output_head_stride = arguments.token_stride = sizes[5];
  arguments.block_stride = sizes[5] * kv::kBlock24Tokens;
  arguments.query = pointers[0];
  arguments.output = pointers[1];
  arguments.keys = pointers[2];
  arguments.values = pointers[3];
  arguments.sparse_keys = {pointers[4], static_cast<const uint32_t*>(pointers[5]), sparse_blocks};
  arguments.sparse_values = {pointers[6], static_cast<const uint32_t*>(pointers[7]), sparse_blocks};
  arguments.block_table = static_cast<const int32_t*>(pointers[8]);
  arguments.value_table = static_cast<const int32_t*>(pointers[9]);
  arguments.key_counts = static_cast<int32_t*>(pointers[10]);
  arguments.slots = static_cast<const int32_t*>(pointers[11]);
  arguments.query_start = static_cast<const int32_t*>(pointers[12]);
  arguments.scale = scale;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const kv::Status status = sizes[0] == 1
                                ? kv::sm80::prefill_attention_24(arguments, cuda_stream)
                                : kv::sm90a::prefill_attention_24(arguments, pointers[13], cuda_stream);
  return kv::tests::result_for_python(status);
}
