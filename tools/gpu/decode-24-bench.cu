// Checks the CUDA kernels of decode-attention-24 against a float64 reference, with nothing but a driver: random
// inputs, NaN in every dense block that is not used, poisoned outputs. Built as a shared library, it is what
// torch-hierasparse.py times next to PyTorch. README.md says how to build both.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention-compare.h"
#include "kernels/decode-attention-24/decode-attention-24.cuda.h"
#include "runtime/fault.h"
#include "sparse-reference.h"

namespace {

struct DecodeCase {
  std::string name;
  std::vector<Sequence> sequences;
  int query_heads = 8;
  int kv_heads = 2;
  int head_dim = 128;
  kv::DType dtype = kv::DType::f16;
  double sparse_keys = 1.0;  // share of the full blocks
  double sparse_values = 1.0;
  bool causal = true;
  bool ampere = false;
  bool shift_scores = false;    // by about 1e4
  bool growing_scores = false;  // later keys score higher and higher
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

std::vector<int> shuffled(int count, Random& random) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// The keys or values of a case: as the cache with 2:4 blocks holds them, and decompressed, with `whole_order` of blocks.
struct Operand24 {
  Operand24(const DecodeCase& test, kv::KvOperand operand, double share, const std::vector<int>& whole_order,
               int table_size, Random& random)
      : operand_(operand),
        test_(test),
        share_(share),
        block_elements_(kv::kBlock24Tokens * test.head_dim),
        mixed(shuffled(static_cast<int>(whole_order.size()), random), block_elements_),
        whole(whole_order, block_elements_),
        mixed_table(table_size, 0),
        whole_table(table_size, 0x7ffffff0),
        non_zeros(whole_order.size() * kv::sparse_block_elements(test.head_dim), kPoison),
        metadata(whole_order.size() * kv::sparse_block_words(test.head_dim), 0x44444444),
        sparse_order_(shuffled(static_cast<int>(whole_order.size()), random)) {}

  // `block`: tokens of them count.
  void add(int place, const std::vector<uint16_t>& block, int tokens, Random& random) {
    const bool sparse = tokens == kv::kBlock24Tokens && pick(random, 1, 1000) <= 1000 * share_;
    whole_table[place] = whole.take();
    uint16_t* to = whole.at(whole_table[place]);
    if (!sparse) {
      std::copy_n(block.begin(), tokens * test_.head_dim, to);
      const int dense = mixed.take();
      std::copy_n(to, block_elements_, mixed.at(dense));
      mixed_table[place] = dense + 1;
      return;
    }
    const HostBlock compressed = compress_on_host(block.data(), nullptr, operand_, test_.dtype, test_.head_dim);
    std::copy(compressed.masked.begin(), compressed.masked.end(), to);
    const int id = sparse_order_[next_sparse_++];
    std::copy(compressed.non_zeros.begin(), compressed.non_zeros.end(),
              non_zeros.begin() + id * kv::sparse_block_elements(test_.head_dim));
    std::copy(compressed.metadata.begin(), compressed.metadata.end(),
              metadata.begin() + id * kv::sparse_block_words(test_.head_dim));
    mixed_table[place] = -(id + 1);
  }

 private:
  kv::KvOperand operand_;
  const DecodeCase& test_;
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
int run_decode(const DecodeCase& test, Random& random) {
  std::normal_distribution<float> normal;
  const int batch = static_cast<int>(test.sequences.size());
  std::vector<int> query_start{0};
  for (const Sequence& sequence : test.sequences) query_start.push_back(query_start.back() + sequence.queries);
  const int rows = query_start.back();
  const int slot_count = batch + 1;
  std::vector<int> slots(batch), counts(slot_count * test.kv_heads, 0);
  int table_width = 1;
  int block_count = 2;
  for (int entry = 0; entry < batch; ++entry) {
    slots[entry] = batch - entry;
    for (int head = 0; head < test.kv_heads; ++head) {
      const int keys = std::max(0, test.sequences[entry].keys - 7 * head);
      counts[slots[entry] * test.kv_heads + head] = keys;
      table_width = std::max(table_width, (keys + 63) / 64);
      block_count += (keys + 63) / 64;
    }
  }
  const int table_size = slot_count * test.kv_heads * table_width;
  const std::vector<int> whole_order = shuffled(block_count, random);
  Operand24 keys(test, kv::KvOperand::keys, test.sparse_keys, whole_order, table_size, random);
  Operand24 values(test, kv::KvOperand::values, test.sparse_values, whole_order, table_size, random);
  std::vector<uint16_t> key_block(64 * test.head_dim), value_block(key_block.size());
  for (int row = 0; row < slot_count * test.kv_heads; ++row) {
    for (int first = 0; first < counts[row]; first += 64) {
      for (int i = 0; i < 64 * test.head_dim; ++i) {
        const float growth = test.growing_scores ? 0.02f * (first + i / test.head_dim) : 1.0f;
        key_block[i] = bits_of<Element>(normal(random) * growth);
        value_block[i] = bits_of<Element>(normal(random));
        if (test.shift_scores && i % test.head_dim == 0) key_block[i] = bits_of<Element>(338.0f);
      }
      const int tokens = std::min(64, counts[row] - first);
      keys.add(row * table_width + first / 64, key_block, tokens, random);
      values.add(row * table_width + first / 64, value_block, tokens, random);
    }
  }
  const int64_t row_elements = int64_t{test.query_heads} * test.head_dim;
  std::vector<uint16_t> query(std::max<int64_t>(1, rows * row_elements));
  for (size_t i = 0; i < query.size(); ++i) {
    query[i] = bits_of<Element>(test.shift_scores && i % test.head_dim == 0 ? 338.0f : normal(random));
  }

  DeviceBuffer<uint16_t> query_buffer(query), mixed_keys(keys.mixed.elements), mixed_values(values.mixed.elements),
      whole_keys(keys.whole.elements), whole_values(values.whole.elements), key_non_zeros(keys.non_zeros),
      value_non_zeros(values.non_zeros);
  DeviceBuffer<uint32_t> key_metadata(keys.metadata), value_metadata(values.metadata);
  DeviceBuffer<int> key_table(keys.mixed_table), value_table(values.mixed_table), whole_table(keys.whole_table),
      counts_buffer(counts), slots_buffer(slots), start_buffer(query_start);
  DeviceBuffer<uint16_t> output_buffer(std::vector<uint16_t>((rows + kGuardRows) * row_elements, kPoison));
  DeviceBuffer<float> lse_buffer(std::vector<float>(size_t(rows + kGuardRows) * test.query_heads, NAN));

  kv::Attention24Arguments arguments;
  arguments.query = query_buffer.get();
  arguments.query_token_stride = arguments.output_token_stride = row_elements;
  arguments.query_head_stride = arguments.output_head_stride = test.head_dim;
  arguments.query_tokens = rows;
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype = test.dtype;
  arguments.output = output_buffer.get();
  arguments.log_sum_exp = lse_buffer.get();
  arguments.keys = mixed_keys.get();
  arguments.values = mixed_values.get();
  arguments.block_stride = 64 * test.head_dim;
  arguments.token_stride = test.head_dim;
  arguments.block_tokens = 64;
  arguments.block_count = block_count;
  arguments.slot_count = slot_count;
  arguments.block_table = key_table.get();
  arguments.value_table = value_table.get();
  arguments.table_width = table_width;
  arguments.key_counts = counts_buffer.get();
  arguments.slots = slots_buffer.get();
  arguments.query_start = start_buffer.get();
  arguments.batch = batch;
  arguments.query_heads = test.query_heads;
  arguments.kv_heads = test.kv_heads;
  arguments.head_dim = test.head_dim;
  arguments.scale = 1.0f / std::sqrt(static_cast<float>(test.head_dim));
  arguments.causal = test.causal;
  arguments.sparse_keys = {key_non_zeros.get(), key_metadata.get(), block_count};
  arguments.sparse_values = {value_non_zeros.get(), value_metadata.get(), block_count};

  kv::DecodeMemory24 memory{};
  check(kv::decode_24_memory(arguments, &memory));
  DeviceBuffer<unsigned char> counters(memory.counter_bytes), workspace(memory.workspace_bytes, 0x5a);
  const DeviceBuffer<kv::Fault> fault(1);
  // Twice: the second launch finds what the first one left in counters and workspace.
  std::vector<uint16_t> outputs[2];
  for (std::vector<uint16_t>& result : outputs) {
    const auto launch = test.ampere ? kv::sm80::decode_attention_24 : kv::sm90a::decode_attention_24;
    check(launch(arguments, counters.get(), workspace.get(), {fault.get()}, nullptr));
    check(cudaDeviceSynchronize(), test.name.c_str());
    result = output_buffer.host();
  }

  kv::PagedAttentionArguments whole = arguments;
  whole.keys = whole_keys.get();
  whole.values = whole_values.get();
  whole.block_table = whole_table.get();
  const int most_keys = *std::max_element(counts.begin(), counts.end());
  const int failed = compare<Element>(test.name, whole, most_keys, output_buffer, lse_buffer);
  return failed + (outputs[0] == outputs[1] ? 0 : report(false, test.name, "two launches differ"));
}

std::vector<Sequence> decode_of(const std::vector<int>& keys) {
  std::vector<Sequence> sequences;
  for (const int count : keys) sequences.push_back({1, count});
  return sequences;
}

std::vector<DecodeCase> decode_cases(bool small_only) {
  std::vector<DecodeCase> list;
  const auto add = [&](const std::string& name, std::vector<Sequence> sequences,
                       const std::function<void(DecodeCase&)>& change) {
    for (const kv::DType dtype : {kv::DType::f16, kv::DType::bf16}) {
      for (const int head_dim : {128, 64}) {
        for (const bool ampere : {false, true}) {
          DecodeCase test;
          test.sequences = sequences;
          test.dtype = dtype;
          test.head_dim = head_dim;
          test.ampere = ampere;
          change(test);
          test.name = std::string("decode ") + (ampere ? "sm80 " : "") + name +
                      (dtype == kv::DType::f16 ? " f16 d" : " bf16 d") + std::to_string(head_dim);
          list.push_back(test);
        }
      }
    }
  };
  const auto mixed = [](double keys, double values) {
    return [=](DecodeCase& test) {
      test.sparse_keys = keys;
      test.sparse_values = values;
    };
  };
  add("small", decode_of({1, 64, 300}), mixed(0.5, 0.5));
  if (small_only) return list;
  const auto lengths = decode_of({1, 15, 63, 64, 65, 128, 1000, 4096, 0, 333});
  for (const double keys : {0.0, 0.5, 1.0}) {
    for (const double values : {0.0, 0.5, 1.0}) {
      add("sparse " + std::to_string(keys).substr(0, 3) + "/" + std::to_string(values).substr(0, 3), lengths,
          mixed(keys, values));
    }
  }
  for (const int heads : {1, 2, 7, 8, 12, 16, 24}) {
    add(std::to_string(heads) + " heads a group", lengths, [=](DecodeCase& test) {
      test.query_heads = 2 * heads;
      test.sparse_keys = test.sparse_values = 0.7;
    });
  }
  add("one long sequence", decode_of({16000}), mixed(0.5, 0.9));
  add("many short sequences", decode_of(std::vector<int>(300, 70)), mixed(0.5, 0.5));
  add("shifted by 1e4", decode_of({900, 5000}), [](DecodeCase& test) { test.shift_scores = true; });
  add("growing maxima", decode_of({1500}), [](DecodeCase& test) { test.growing_scores = true; });
  const std::vector<Sequence> few{{3, 100}, {0, 50}, {1, 2000}, {5, 5}, {2, 1}, {4, 700}};
  add("a few queries each", few, mixed(0.5, 0.5));
  add("many queries, with small runs", {{48, 12000}, {9, 3000}}, mixed(0.5, 0.5));
  add("a few queries each, all keys", few, [](DecodeCase& test) { test.causal = false; });
  return list;
}

}  // namespace

// For torch-hierasparse.py, contiguous tensors; returns 0, or print why not.
// `sizes`: batch, query heads, kv heads, head dim, table width, bf16, dense blocks, sparse blocks, 1 for the kernel of
// sm_80. `pointers`: query, output, dense keys, values, map of keys, of values, non-zeros and metadata of keys, of
// values, key counts, slots, query start, workspace, counters.
extern "C" int kv_decode_24(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
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
  static const DeviceBuffer<kv::Fault> fault(1);
  const kv::Status status =
      launch(arguments, pointers[14], pointers[13], {fault.get()}, static_cast<cudaStream_t>(stream));
  if (!status.ok()) std::printf("%s\n", status.message.c_str());
  return status.ok() ? 0 : 1;
}

// usage: decode-24-bench [small] [seed]
int main(int argc, char** argv) {
  const bool small_only = argc > 1 && std::string(argv[1]) == "small";
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : std::random_device{}();
  Random random(seed);
  int failed = 0;
  const std::vector<DecodeCase> list = decode_cases(small_only);
  for (const DecodeCase& test : list) {
    failed += test.dtype == kv::DType::f16 ? run_decode<__half>(test, random) : run_decode<__nv_bfloat16>(test, random);
  }
  std::printf("tests: %d passed, %d failed, 0 skipped (seed %u)\n", static_cast<int>(list.size()) - failed, failed,
              seed);
  return failed == 0 ? 0 : 1;
}
