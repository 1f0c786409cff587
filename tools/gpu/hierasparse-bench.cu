// Checks the CUDA kernels of 2:4 sparse caches with nothing but a driver: metadata as the tensor cores read it,
// compression bit for bit against the host, decode over dense and sparse blocks against float64. Built as a shared
// library, it is what torch-hierasparse.py times next to PyTorch. README.md says how to build both.
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "attention-compare.h"
#include "kernels/compress-24/compress-24.cuda.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention.cuda.h"
#include "ptx/mma-sparse.h"
#include "ptx/mma.h"
#include "runtime/fault.h"
#include "sparse-reference.h"

namespace {

using Random = std::mt19937;

int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

int report(bool passed, const std::string& name, const std::string& detail) {
  std::printf("%s %-72s %s\n", passed ? "pass" : "FAIL", name.c_str(), detail.c_str());
  return passed ? 0 : 1;
}

template <typename Element>
uint16_t bits_of(float value) {
  const Element element(value);
  uint16_t bits;
  std::memcpy(&bits, &element, 2);
  return bits;
}

// ---- Metadata, as the tensor cores read it. ----

// out[0] = a * b with a compressed, out[1] with the dense a, [16, 8] each, by one warp; a is [16, 64].
template <typename Element>
__global__ void multiply_kernel(const uint16_t* non_zeros, const uint32_t* metadata, const uint16_t* dense,
                                const uint16_t* b, float* out) {
  const int g = threadIdx.x / 4;
  const int c = threadIdx.x % 4;
  const auto two = [](const uint16_t* from) { return uint32_t{from[0]} | uint32_t{from[1]} << 16; };
  const auto a_fragment = [&](const uint16_t* a, int columns, int column, uint32_t(&fragment)[4]) {
    for (int i = 0; i < 4; ++i) fragment[i] = two(a + (g + i % 2 * 8) * columns + column + i / 2 * 8 + 2 * c);
  };
  uint32_t columns[8];  // of b, [8, 64] transposed
  for (int i = 0; i < 8; ++i) columns[i] = two(b + g * 64 + 8 * i + 2 * c);
  float sparse[4] = {};
  float full[4] = {};
  uint32_t fragment[4];
  a_fragment(non_zeros, 32, 0, fragment);
  kv::ptx::mma_sparse_m16n8k32<Element, 0>(sparse, fragment, columns, metadata[threadIdx.x]);
  a_fragment(non_zeros, 32, 16, fragment);
  kv::ptx::mma_sparse_m16n8k32<Element, 1>(sparse, fragment, columns + 4, metadata[threadIdx.x]);
  for (int k = 0; k < 4; ++k) {
    a_fragment(dense, 64, 16 * k, fragment);
    kv::ptx::mma_m16n8k16<Element>(full, fragment, columns[2 * k], columns[2 * k + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const int at = (g + i / 2 * 8) * 8 + 2 * c + i % 2;
    out[at] = sparse[i];
    out[128 + at] = full[i];
  }
}

template <typename Element>
int check_metadata(const std::string& name, Random& random) {
  int wrong = 0;
  for (int round = 0; round < 20; ++round) {
    // Every row a key of 64 dims, so that the host's compression gives the words.
    std::vector<uint16_t> dense(64 * 64);
    std::vector<int> values(dense.size());
    for (int group = 0; group < 64 * 16; ++group) {
      const int first = pick(random, 0, 2);
      const int second = pick(random, first + 1, 3);
      for (const int place : {first, second}) {
        values[4 * group + place] = pick(random, 1, 100) * (pick(random, 0, 1) * 2 - 1);
        dense[4 * group + place] = bits_of<Element>(values[4 * group + place]);
      }
    }
    const HostBlock block =
        compress_on_host(dense.data(), nullptr, kv::KvOperand::keys, kv::DType::f16, 64);
    std::vector<uint16_t> non_zeros(16 * 32);
    for (int i = 0; i < 16 * 32; ++i) non_zeros[i] = block.non_zeros[kv::key_non_zero(i / 32, i % 32, 64)];
    // Eight columns of the identity, or integers.
    std::vector<uint16_t> b(8 * 64);
    std::vector<int> b_values(b.size());
    for (int column = 0; column < 8; ++column) {
      for (int k = 0; k < 64; ++k) {
        b_values[column * 64 + k] = round < 8 ? k == round * 8 + column : pick(random, -100, 100);
        b[column * 64 + k] = bits_of<Element>(b_values[column * 64 + k]);
      }
    }
    DeviceBuffer<uint16_t> non_zeros_buffer(non_zeros), dense_buffer(dense), b_buffer(b);
    DeviceBuffer<uint32_t> metadata_buffer(block.metadata);
    DeviceBuffer<float> out_buffer(std::vector<float>(256, NAN));
    multiply_kernel<Element><<<1, 32>>>(non_zeros_buffer.get(), metadata_buffer.get(), dense_buffer.get(),
                                        b_buffer.get(), out_buffer.get());
    check(cudaDeviceSynchronize(), "multiply");
    const std::vector<float> out = out_buffer.host();
    for (int i = 0; i < 128; ++i) {
      int expected = 0;
      for (int k = 0; k < 64; ++k) expected += values[i / 8 * 64 + k] * b_values[i % 8 * 64 + k];
      wrong += out[i] != static_cast<float>(expected) || out[128 + i] != static_cast<float>(expected);
    }
  }
  return report(wrong == 0, name, std::to_string(wrong) + " of 2560 wrong");
}

// ---- Compression. ----

struct CompressionCase {
  std::string name;
  kv::KvOperand operand = kv::KvOperand::keys;
  kv::DType dtype = kv::DType::f16;
  int head_dim = 128;
  double share = 1.0;  // of the dense blocks that become sparse
  bool masked = false;
  bool any_bits = false;  // NaN, infinities, zeros of both signs, ties
};

std::vector<uint16_t> random_blocks(int64_t elements, kv::DType dtype, bool any_bits, Random& random) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> result(elements);
  const uint16_t infinity = dtype == kv::DType::f16 ? 0x7c00 : 0x7f80;
  const uint16_t special[] = {0, 0x8000, infinity, uint16_t(infinity | 0x8000), uint16_t(infinity | 1), 0xffff, 0x3c00};
  for (uint16_t& bits : result) {
    bits = dtype == kv::DType::f16 ? bits_of<__half>(normal(random)) : bits_of<__nv_bfloat16>(normal(random));
    if (any_bits && pick(random, 0, 1) != 0) bits = special[pick(random, 0, 6)];
  }
  return result;
}

int run_compression(const CompressionCase& test, Random& random) {
  constexpr int kKvHeads = 3;
  constexpr int kSlots = 2;
  constexpr int kWidth = 700;
  constexpr int kDenseBlocks = 1500;
  constexpr int kSparseBlocks = 1600;
  const int64_t elements = int64_t{kv::kMixedBlockTokens} * test.head_dim;
  std::vector<uint16_t> dense = random_blocks(kDenseBlocks * elements, test.dtype, test.any_bits, random);
  std::vector<uint8_t> mask(kKvHeads * elements);
  for (int head = 0; head < kKvHeads; ++head) {
    for (int group = 0; group < elements / 4; ++group) {
      const int stride = test.operand == kv::KvOperand::keys ? 1 : test.head_dim;
      const int64_t first = test.operand == kv::KvOperand::keys
                                ? 4 * group
                                : group / test.head_dim * 4 * test.head_dim + group % test.head_dim;
      for (int kept = 0; kept < 2; ++kept) mask[head * elements + first + pick(random, 0, 3) * stride] = 1;
    }
  }
  // Heads of several lengths over blocks in random order; some of the first blocks are sparse already.
  std::vector<int> order(kDenseBlocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int> table(kSlots * kKvHeads * kWidth, 0), ids(kSparseBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  std::vector<uint16_t> expected_dense = dense;
  std::vector<uint16_t> expected_non_zeros(kSparseBlocks * kv::sparse_block_elements(test.head_dim), 0xabcd);
  std::vector<uint32_t> expected_metadata(kSparseBlocks * kv::sparse_block_words(test.head_dim), 0xabcdabcd);
  std::vector<kv::Pruning> prunings;
  const std::vector<uint16_t> untouched_non_zeros = expected_non_zeros;
  const std::vector<uint32_t> untouched_metadata = expected_metadata;
  std::vector<int> expected_table;
  int next_dense = 0;
  int next_id = 0;
  int most_blocks = 0;
  const int lengths[] = {1, 5, 200, 300, 0, 610};
  for (int row = 0; row < kSlots * kKvHeads; ++row) {
    for (int block = 0; block < lengths[row]; ++block) {
      table[row * kWidth + block] = row % 2 == 1 && block % 7 == 3 ? -(1000 + block) : order[next_dense++] + 1;
    }
  }
  expected_table = table;
  for (int row = kSlots * kKvHeads - 1; row >= 0; --row) {
    kv::Pruning pruning{row, lengths[row] > 20 ? 2 : 0, lengths[row] > 20 ? lengths[row] - 3 : lengths[row], 0, 0, 0};
    std::vector<int> blocks;
    for (int block = pruning.first_block; block < pruning.end_block; ++block) {
      if (table[row * kWidth + block] > 0) blocks.push_back(block);
    }
    pruning.count = static_cast<int>(std::lround(test.share * static_cast<double>(blocks.size())));
    pruning.first_id = next_id;
    next_id += pruning.count;
    std::vector<int> dense_ids;
    for (const int block : blocks) dense_ids.push_back(table[row * kWidth + block] - 1);
    std::sort(dense_ids.begin(), dense_ids.end());
    pruning.freed_from = pruning.count > 0 ? dense_ids[dense_ids.size() - pruning.count] : kDenseBlocks;
    most_blocks = std::max(most_blocks, pruning.end_block - pruning.first_block);
    prunings.push_back(pruning);

    std::vector<HostBlock> compressed;
    for (const int block : blocks) {
      compressed.push_back(compress_on_host(dense.data() + (table[row * kWidth + block] - 1) * elements,
                                            test.masked ? mask.data() + row % kKvHeads * elements : nullptr,
                                            test.operand, test.dtype, test.head_dim));
    }
    std::vector<int> by_loss(blocks.size());
    std::iota(by_loss.begin(), by_loss.end(), 0);
    std::stable_sort(by_loss.begin(), by_loss.end(),
                     [&](int a, int b) { return compressed[a].loss < compressed[b].loss; });
    std::vector<bool> chosen(blocks.size());
    for (int i = 0; i < pruning.count; ++i) chosen[by_loss[i]] = true;
    int id = pruning.first_id;
    std::vector<int> vacated, moving;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const int place = table[row * kWidth + blocks[i]] - 1;
      if (chosen[i]) {
        const int sparse = ids[id++];
        expected_table[row * kWidth + blocks[i]] = -(sparse + 1);
        std::copy(compressed[i].non_zeros.begin(), compressed[i].non_zeros.end(),
                  expected_non_zeros.begin() + sparse * kv::sparse_block_elements(test.head_dim));
        std::copy(compressed[i].metadata.begin(), compressed[i].metadata.end(),
                  expected_metadata.begin() + sparse * kv::sparse_block_words(test.head_dim));
        if (place < pruning.freed_from) vacated.push_back(place);
      } else if (place >= pruning.freed_from) {
        moving.push_back(blocks[i]);
      }
    }
    for (size_t i = 0; i < moving.size(); ++i) {
      const int from = table[row * kWidth + moving[i]] - 1;
      std::copy_n(dense.begin() + from * elements, elements, expected_dense.begin() + vacated[i] * elements);
      expected_table[row * kWidth + moving[i]] = vacated[i] + 1;
    }
  }

  DeviceBuffer<uint16_t> dense_buffer(dense), non_zeros_buffer(untouched_non_zeros);
  DeviceBuffer<uint32_t> metadata_buffer(untouched_metadata);
  DeviceBuffer<int> table_buffer(table), ids_buffer(ids);
  DeviceBuffer<uint8_t> mask_buffer(mask);
  DeviceBuffer<kv::Pruning> prunings_buffer(prunings);
  DeviceBuffer<kv::Fault> fault_buffer(size_t{1});
  kv::Compress24Arguments arguments;
  arguments.operand = test.operand;
  arguments.dtype = test.dtype;
  arguments.head_dim = test.head_dim;
  arguments.dense = dense_buffer.get();
  arguments.dense_block_count = kDenseBlocks;
  arguments.non_zeros = non_zeros_buffer.get();
  arguments.metadata = metadata_buffer.get();
  arguments.sparse_block_count = kSparseBlocks;
  arguments.table = table_buffer.get();
  arguments.table_width = kWidth;
  arguments.kv_heads = kKvHeads;
  arguments.slot_count = kSlots;
  arguments.prunings = prunings_buffer.get();
  arguments.pruning_count = static_cast<int>(prunings.size());
  arguments.most_blocks = most_blocks;
  arguments.ids = ids_buffer.get();
  arguments.id_count = kSparseBlocks;
  arguments.element_mask = test.masked ? mask_buffer.get() : nullptr;
  DeviceBuffer<unsigned char> workspace(kv::pruning_plan_bytes(arguments), 0x5a);
  check(kv::enqueue_compress_24(arguments, workspace.get(), {fault_buffer.get(), "compress-24"}, nullptr));
  check(cudaDeviceSynchronize(), test.name.c_str());

  const auto differences = [](const auto& a, const auto& b) {
    int count = 0;
    for (size_t i = 0; i < a.size(); ++i) count += a[i] != b[i];
    return count;
  };
  const int faults = fault_buffer.host()[0].claimed;
  const int counts[] = {differences(non_zeros_buffer.host(), expected_non_zeros),
                        differences(metadata_buffer.host(), expected_metadata),
                        differences(dense_buffer.host(), expected_dense),
                        differences(table_buffer.host(), expected_table)};
  std::string detail = "different non-zeros, words, dense, places:";
  for (const int count : counts) detail += " " + std::to_string(count);
  detail += ", faults " + std::to_string(faults);
  return report(counts[0] + counts[1] + counts[2] + counts[3] + faults == 0, test.name, detail);
}

// ---- Decode. ----

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

// The keys or values of a case: as the mixed cache holds them, and decompressed, with `whole_order` of blocks.
struct MixedOperand {
  MixedOperand(const DecodeCase& test, kv::KvOperand operand, double share, const std::vector<int>& whole_order,
               int table_size, Random& random)
      : operand_(operand),
        test_(test),
        share_(share),
        block_elements_(kv::kMixedBlockTokens * test.head_dim),
        mixed(shuffled(static_cast<int>(whole_order.size()), random), block_elements_),
        whole(whole_order, block_elements_),
        mixed_table(table_size, 0),
        whole_table(table_size, 0x7ffffff0),
        non_zeros(whole_order.size() * kv::sparse_block_elements(test.head_dim), kPoison),
        metadata(whole_order.size() * kv::sparse_block_words(test.head_dim), 0x44444444),
        sparse_order_(shuffled(static_cast<int>(whole_order.size()), random)) {}

  // `block`: tokens of them count.
  void add(int place, const std::vector<uint16_t>& block, int tokens, Random& random) {
    const bool sparse = tokens == kv::kMixedBlockTokens && pick(random, 1, 1000) <= 1000 * share_;
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
  MixedOperand keys(test, kv::KvOperand::keys, test.sparse_keys, whole_order, table_size, random);
  MixedOperand values(test, kv::KvOperand::values, test.sparse_values, whole_order, table_size, random);
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

  kv::MixedAttentionArguments arguments;
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

  kv::MixedDecodeMemory memory{};
  check(kv::mixed_decode_memory(arguments, &memory));
  DeviceBuffer<unsigned char> counters(memory.counter_bytes), workspace(memory.workspace_bytes, 0x5a);
  // Twice: the second launch finds what the first one left in counters and workspace.
  std::vector<uint16_t> outputs[2];
  for (std::vector<uint16_t>& result : outputs) {
    const auto launch = test.ampere ? kv::sm80::mixed_decode_attention : kv::sm90a::mixed_decode_attention;
    check(launch(arguments, counters.get(), workspace.get(), nullptr));
    check(cudaDeviceSynchronize(), test.name.c_str());
    result = output_buffer.host();
  }

  kv::PagedAttentionArguments whole = arguments;
  whole.keys = whole_keys.get();
  whole.values = whole_values.get();
  whole.block_table = whole_table.get();
  const int most_keys = *std::max_element(counts.begin(), counts.end());
  const int failed = compare<Element>(test.name, whole, most_keys, output_buffer, lse_buffer);
  if (failed == 0 && outputs[0] == outputs[1]) return 0;
  return report(outputs[0] == outputs[1], test.name, "two launches differ") | failed;
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
  add("a few queries each, all keys", few, [](DecodeCase& test) { test.causal = false; });
  return list;
}

std::vector<CompressionCase> compression_cases(bool small_only) {
  std::vector<CompressionCase> list;
  for (const auto operand : {kv::KvOperand::keys, kv::KvOperand::values}) {
    for (const int head_dim : {128, 64}) {
      for (const auto dtype : {kv::DType::f16, kv::DType::bf16}) {
        for (const bool masked : {false, true}) {
          for (const double share : {1.0, 0.5, 0.0}) {
            for (const bool any_bits : {false, true}) {
              // Losses that are NaN or infinite do not order the blocks.
              if (any_bits && share == 0.5) continue;
              CompressionCase test{"", operand, dtype, head_dim, share, masked, any_bits};
              test.name = std::string(operand == kv::KvOperand::keys ? "compress keys" : "compress values") +
                          (dtype == kv::DType::f16 ? " f16 d" : " bf16 d") + std::to_string(head_dim) +
                          (masked ? " masked" : "") + " share " + std::to_string(share).substr(0, 3) +
                          (any_bits ? " any bits" : "");
              if (!small_only || (dtype == kv::DType::f16 && share == 0.5)) list.push_back(test);
            }
          }
        }
      }
    }
  }
  return list;
}

}  // namespace

// For torch-hierasparse.py, contiguous tensors; they return 0, or print why not.
// `sizes`: batch, query heads, kv heads, head dim, table width, bf16, dense blocks, sparse blocks, 1 for the kernel of
// sm_80. `pointers`: query, output, dense keys, values, map of keys, of values, non-zeros and metadata of keys, of
// values, key counts, slots, query start, workspace, counters.
extern "C" int kv_mixed_decode(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::MixedAttentionArguments arguments;
  arguments.batch = arguments.query_tokens = arguments.slot_count = static_cast<int32_t>(sizes[0]);
  arguments.query_heads = static_cast<int32_t>(sizes[1]);
  arguments.kv_heads = static_cast<int32_t>(sizes[2]);
  arguments.head_dim = static_cast<int32_t>(sizes[3]);
  arguments.table_width = static_cast<int32_t>(sizes[4]);
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype = sizes[5] ? kv::DType::bf16 : kv::DType::f16;
  arguments.block_count = static_cast<int32_t>(sizes[6]);
  arguments.query_token_stride = arguments.output_token_stride = sizes[1] * sizes[3];
  arguments.query_head_stride = arguments.output_head_stride = arguments.token_stride = sizes[3];
  arguments.block_tokens = kv::kMixedBlockTokens;
  arguments.block_stride = kv::kMixedBlockTokens * sizes[3];
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
  const auto launch = sizes[8] != 0 ? kv::sm80::mixed_decode_attention : kv::sm90a::mixed_decode_attention;
  const kv::Status status = launch(arguments, pointers[14], pointers[13], static_cast<cudaStream_t>(stream));
  if (!status.ok()) std::printf("%s\n", status.message.c_str());
  return status.ok() ? 0 : 1;
}

// `sizes`: 1 for values, head dim, bf16, dense blocks, sparse blocks, table width, kv heads, slots, prunings, most
// blocks of one, ids. `pointers`: dense, non-zeros, metadata, map, prunings, ids, workspace, fault.
extern "C" int kv_compress(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::Compress24Arguments arguments;
  arguments.operand = sizes[0] != 0 ? kv::KvOperand::values : kv::KvOperand::keys;
  arguments.head_dim = static_cast<int32_t>(sizes[1]);
  arguments.dtype = sizes[2] != 0 ? kv::DType::bf16 : kv::DType::f16;
  arguments.dense_block_count = static_cast<int32_t>(sizes[3]);
  arguments.sparse_block_count = static_cast<int32_t>(sizes[4]);
  arguments.table_width = static_cast<int32_t>(sizes[5]);
  arguments.kv_heads = static_cast<int32_t>(sizes[6]);
  arguments.slot_count = static_cast<int32_t>(sizes[7]);
  arguments.pruning_count = static_cast<int32_t>(sizes[8]);
  arguments.most_blocks = static_cast<int32_t>(sizes[9]);
  arguments.id_count = static_cast<int32_t>(sizes[10]);
  arguments.dense = pointers[0];
  arguments.non_zeros = pointers[1];
  arguments.metadata = static_cast<uint32_t*>(pointers[2]);
  arguments.table = static_cast<int32_t*>(pointers[3]);
  arguments.prunings = static_cast<const kv::Pruning*>(pointers[4]);
  arguments.ids = static_cast<const int32_t*>(pointers[5]);
  const kv::FaultSink faults{static_cast<kv::Fault*>(pointers[7]), "compress-24"};
  const kv::Status status =
      kv::enqueue_compress_24(arguments, pointers[6], faults, static_cast<cudaStream_t>(stream));
  if (!status.ok()) std::printf("%s\n", status.message.c_str());
  return status.ok() ? 0 : 1;
}

// usage: hierasparse-bench [small] [seed]
int main(int argc, char** argv) {
  const bool small_only = argc > 1 && std::string(argv[1]) == "small";
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : std::random_device{}();
  Random random(seed);
  int failed = check_metadata<__half>("metadata and integers f16", random) +
               check_metadata<__nv_bfloat16>("metadata and integers bf16", random);
  int count = 2;
  for (const CompressionCase& test : compression_cases(small_only)) {
    failed += run_compression(test, random);
    ++count;
  }
  for (const DecodeCase& test : decode_cases(small_only)) {
    failed += test.dtype == kv::DType::f16 ? run_decode<__half>(test, random) : run_decode<__nv_bfloat16>(test, random);
    ++count;
  }
  std::printf("tests: %d passed, %d failed, 0 skipped (seed %u)\n", count - failed, failed, seed);
  return failed == 0 ? 0 : 1;
}
