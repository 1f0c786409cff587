// Decode attention over dense and 2:4 blocks against float64: random inputs, NaN in every dense block that is not used,
// poisoned outputs.
#include <algorithm>
#include <string>
#include <vector>

#include "kernels/decode-attention-24/decode-attention-24.cuda.h"
#include "tests/cuda/kernels/attention-reference.cuda.h"
#include "tests/cuda/kernels/compress-24-reference.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/kernel-testing.h"

namespace kv::tests {
namespace {

struct Case : AttentionCase {
  Case() { heads_differ = true; }

  double sparse_keys = 1.0;  // share of the full blocks
  double sparse_values = 1.0;
};

// A pool of dense blocks, all NaN at first, of which some are handed out in an order.
class DensePool {
 public:
  DensePool(const std::vector<int>& order, int64_t block_elements)
      : elements(order.size() * block_elements, kPoison), block_elements_(block_elements), order_(order) {}
  int take() { return order_[next_++]; }
  uint16_t* at(int block) { return elements.data() + block * block_elements_; }

  std::vector<uint16_t> elements;

 private:
  int64_t block_elements_;
  std::vector<int> order_;
  int next_ = 0;
};

// The keys or values of a case: as the cache with 2:4 blocks holds them, and decompressed, with `whole_order` of
// blocks.
struct Operand24 {
  Operand24(const Case& test, KvOperand operand, double share, const std::vector<int>& whole_order, size_t table_size,
            Random& random)
      : operand_(operand),
        test_(test),
        share_(share),
        block_elements_(kBlock24Tokens * test.head_dim),
        mixed(shuffled(static_cast<int>(whole_order.size()), random), block_elements_),
        whole(whole_order, block_elements_),
        mixed_table(table_size, kNoBlock),
        whole_table(table_size, kNoBlock),
        non_zeros(whole_order.size() * sparse_block_elements(test.head_dim), kPoison),
        metadata(whole_order.size() * sparse_block_words(test.head_dim), 0x44444444),
        sparse_order_(shuffled(static_cast<int>(whole_order.size()), random)) {}

  // `block`: tokens of them count.
  void add(size_t place, const std::vector<uint16_t>& block, int tokens, Random& random) {
    const bool sparse = tokens == kBlock24Tokens && pick(random, 1, 1000) <= 1000 * share_;
    whole_table[place] = whole.take();
    uint16_t* to = whole.at(whole_table[place]);
    if (!sparse) {
      std::copy_n(block.begin(), tokens * test_.head_dim, to);
      const int dense = mixed.take();
      std::copy_n(to, block_elements_, mixed.at(dense));
      mixed_table[place] = dense;
      return;
    }
    const HostBlock compressed = compress_on_host(block.data(), nullptr, operand_, test_.dtype, test_.head_dim);
    std::copy(compressed.masked.begin(), compressed.masked.end(), to);
    const int id = sparse_order_[next_sparse_++];
    std::copy(compressed.non_zeros.begin(), compressed.non_zeros.end(),
              non_zeros.begin() + id * sparse_block_elements(test_.head_dim));
    std::copy(compressed.metadata.begin(), compressed.metadata.end(),
              metadata.begin() + id * sparse_block_words(test_.head_dim));
    mixed_table[place] = block_entry(BlockKind::sparse_24, id);
  }

 private:
  KvOperand operand_;
  const Case& test_;
  double share_;
  int64_t block_elements_;

 public:
  DensePool mixed;
  DensePool whole;
  std::vector<int> mixed_table;
  std::vector<int> whole_table;
  std::vector<uint16_t> non_zeros;
  std::vector<uint32_t> metadata;

 private:
  std::vector<int> sparse_order_;
  int next_sparse_ = 0;
};

template <typename Element>
Outcome attend(const Case& test, Random& random) {
  std::normal_distribution<float> normal;
  const BatchLayout layout(test);
  const std::vector<int> whole_order = shuffled(layout.block_count, random);
  Operand24 keys(test, KvOperand::keys, test.sparse_keys, whole_order, layout.table_size(), random);
  Operand24 values(test, KvOperand::values, test.sparse_values, whole_order, layout.table_size(), random);
  std::vector<uint16_t> key_block(kBlock24Tokens * test.head_dim), value_block(key_block.size());
  for (size_t cache_head = 0; cache_head < layout.counts.size(); ++cache_head) {
    for (int first = 0; first < layout.counts[cache_head]; first += kBlock24Tokens) {
      for (int i = 0; i < kBlock24Tokens * test.head_dim; ++i) {
        const float growth = test.growth > 0 ? test.growth * (first + i / test.head_dim) : 1.0f;
        key_block[i] = bits_of<Element>(normal(random) * growth);
        value_block[i] = bits_of<Element>(normal(random));
        if (test.shift_scores && i % test.head_dim == 0) key_block[i] = bits_of<Element>(kLargeElement);
      }
      const int tokens = std::min(kBlock24Tokens, layout.counts[cache_head] - first);
      const size_t place = cache_head * layout.table_width + first / kBlock24Tokens;
      keys.add(place, key_block, tokens, random);
      values.add(place, value_block, tokens, random);
    }
  }

  const AttentionOperands<Element> operands(test, layout, random_query<Element>(test, layout.rows, random));
  const DeviceBuffer<uint16_t> mixed_keys(keys.mixed.elements), mixed_values(values.mixed.elements),
      whole_keys(keys.whole.elements), whole_values(values.whole.elements), key_non_zeros(keys.non_zeros),
      value_non_zeros(values.non_zeros);
  const DeviceBuffer<uint32_t> key_metadata(keys.metadata), value_metadata(values.metadata);
  const DeviceBuffer<int> key_table(keys.mixed_table), value_table(values.mixed_table), whole_table(keys.whole_table);
  Attention24Arguments arguments;
  static_cast<PagedAttentionArguments&>(arguments) = operands.arguments();
  arguments.keys = mixed_keys.get();
  arguments.values = mixed_values.get();
  arguments.block_table = key_table.get();
  arguments.value_table = value_table.get();
  arguments.sparse_keys = {key_non_zeros.get(), key_metadata.get(), layout.block_count};
  arguments.sparse_values = {value_non_zeros.get(), value_metadata.get(), layout.block_count};

  DecodeMemory24 memory{};
  succeeds(decode_24_memory(arguments, &memory));
  const DeviceBuffer<unsigned char> counters(memory.counter_bytes), workspace(memory.workspace_bytes, 0x5a);
  const DeviceBuffer<Fault> fault(1);
  const auto launch = test.ampere ? sm80::decode_attention_24 : sm90a::decode_attention_24;
  const bool same = operands.repeats(
      [&] { return launch(arguments, counters.get(), workspace.get(), {fault.get()}, nullptr); });

  PagedAttentionArguments whole = arguments;
  whole.keys = whole_keys.get();
  whole.values = whole_values.get();
  whole.block_table = whole_table.get();
  Outcome outcome = compare_with_reference(whole, layout.most_keys(), operands);
  outcome.expect(same, "two launches differ");
  return outcome;
}

std::vector<Case> drawn_decode_cases() {
  CaseList<Case> list(true);
  const auto mixed = [](double keys, double values) {
    return [=](Case& test) {
      test.sparse_keys = keys;
      test.sparse_values = values;
    };
  };
  list.add("small", decode_of({1, 64, 300}), mixed(0.5, 0.5));
  if (only_small_cases()) return list.cases;
  const auto lengths = decode_of({1, 15, 63, 64, 65, 128, 1000, 4096, 0, 333});
  for (const double keys : {0.0, 0.5, 1.0}) {
    for (const double values : {0.0, 0.5, 1.0}) {
      list.add("sparse " + std::to_string(keys).substr(0, 3) + "/" + std::to_string(values).substr(0, 3), lengths,
          mixed(keys, values));
    }
  }
  for (const int heads : {1, 2, 7, 8, 12, 16, 24}) {
    list.add(std::to_string(heads) + " heads a group", lengths, [=](Case& test) {
      test.query_heads = 2 * heads;
      test.sparse_keys = test.sparse_values = 0.7;
    });
  }
  list.add("one long sequence", decode_of({16000}), mixed(0.5, 0.9));
  list.add("many short sequences", decode_of(std::vector<int>(300, 70)), mixed(0.5, 0.5));
  list.add("shifted by 1e4", decode_of({900, 5000}), [](Case& test) { test.shift_scores = true; });
  list.add("growing maxima", decode_of({1500}), [](Case& test) { test.growth = 0.02f; });
  list.add("a few queries each", few_queries_each(), mixed(0.5, 0.5));
  list.add("many queries, with small runs", {{48, 12000}, {9, 3000}}, mixed(0.5, 0.5));
  list.add("a few queries each, all keys", few_queries_each(), [](Case& test) { test.causal = false; });
  return list.cases;
}

}  // namespace

TEST("decode-attention-24 agrees with float64") {
  run_cases(drawn_decode_cases(), [](const Case& test, Random& random) {
    return with_16_bit_type(test.dtype, [&](auto element) { return attend<decltype(element)>(test, random); });
  });
}

}  // namespace kv::tests

// For torch-hierasparse.py, contiguous tensors; returns 0, or print why not.
// `sizes`: batch, query heads, kv heads, head dim, table width, bf16, dense blocks, sparse blocks, 1 for the kernel of
// sm_80. `pointers`: query, output, dense keys, values, map of keys, of values, non-zeros and metadata of keys, of
// values, key counts, slots, query start, workspace, counters.
KV_FOR_PYTHON int kv_decode_24(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::Attention24Arguments arguments;
  arguments.batch = arguments.query_tokens = arguments.slot_count = static_cast<int32_t>(sizes[0]);
  arguments.query_heads = static_cast<int32_t>(sizes[1]);
  arguments.kv_heads = static_cast<int32_t>(sizes[2]);
  arguments.head_dim = static_cast<int32_t>(sizes[3]);
  arguments.table_width = static_cast<int32_t>(sizes[4]);
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype = sizes[5] ? kv::DType::bf16 : kv::DType::f16;
  arguments.block_count = static_cast<int32_t>(sizes[6]);
  arguments.query_token_stride = arguments.output_token_stride = sizes[1] * sizes[3];
  arguments.query_head_stride = arguments.output_head_stride = arguments.token_stride = sizes[3];
  arguments.block_tokens = kv::kBlock24Tokens;
  arguments.block_stride = kv::kBlock24Tokens * sizes[3];
  arguments.query = pointers[0];
  arguments.output = pointers[1];
  arguments.keys = pointers[2];
  arguments.values = pointers[3];
  arguments.block_table = static_cast<const int32_t*>(pointers[4]);
  arguments.value_table = static_cast<const int32_t*>(pointers[5]);
  arguments.sparse_keys = {pointers[6], static_cast<const uint32_t*>(pointers[7]), static_cast<int32_t>(sizes[7])};
  arguments.sparse_values = {pointers[8], static_cast<const uint32_t*>(pointers[9]), static_cast<int32_t>(sizes[7])};
  arguments.key_counts = static_cast<int32_t*>(pointers[10]);
  arguments.slots = static_cast<const int32_t*>(pointers[11]);
  arguments.query_start = static_cast<const int32_t*>(pointers[12]);
  arguments.scale = scale;
  const auto launch = sizes[8] != 0 ? kv::sm80::decode_attention_24 : kv::sm90a::decode_attention_24;
  const kv::FaultSink faults{kv::tests::fault_for_python(), "decode-attention-24"};
  const kv::Status status =
      launch(arguments, pointers[14], pointers[13], faults, static_cast<cudaStream_t>(stream));
  return kv::tests::result_for_python(status);
}
