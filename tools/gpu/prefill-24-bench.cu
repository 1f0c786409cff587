// Checks the CUDA kernels of prefill attention over dense and 2:4 blocks against a float64 reference, with nothing but a
// driver: random inputs and random 2:4 masks, NaN in every cache row that holds no key and in every unused block,
// poisoned outputs. Built as a shared library, it is what torch-prefill-24.py times next to PyTorch. README.md says
// how to build both.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention-compare.h"
#include "kernels/prefill-attention-24/prefill-attention-24.cuda.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "shared/blocks-24/blocks-24.cuda.h"

namespace {

constexpr int kTokens = kv::kBlock24Tokens;

struct Case {
  std::string name;
  std::vector<Sequence> sequences;
  int query_heads = 8;
  int kv_heads = 2;
  int head_dim = 128;
  kv::DType dtype = kv::DType::f16;
  double sparse_keys = 0.5;  // share of the full blocks
  double sparse_values = 0.5;
  bool causal = true;
  bool ampere = false;         // with the kernel that sm_80 takes, instead of sm_90a's
  bool heads_differ = false;   // kv head h keeps 7 * h keys fewer
  bool shift_scores = false;   // by about 1e4
  bool growing_scores = false; // later keys score higher and higher, so that running maxima keep moving
  bool exact = false;          // small integers, for which all sums are exact: dense and sparse storage agree bit for bit
};

// The keys or the values of a cache with 2:4 blocks: what kernels read, and the same as a plain cache of `block` blocks.
template <typename Element>
struct Operand {
  kv::KvOperand kind;
  int head_dim;
  std::vector<Element> plain, dense, non_zeros;
  std::vector<uint32_t> metadata;
  std::vector<int> table, dense_ids, sparse_ids;

  Operand(kv::KvOperand kind, int head_dim, int blocks, size_t table_size, std::mt19937& random)
      : kind(kind), head_dim(head_dim), table(table_size, 0x7ffffff0), dense_ids(blocks), sparse_ids(blocks) {
    const Element nan = Element(NAN);
    plain.assign(size_t(blocks) * kTokens * head_dim, nan);
    dense = plain;
    non_zeros.assign(plain.size() / 2, nan);
    metadata.assign(blocks * kv::sparse_block_words(head_dim), 0x44444444);
    for (auto* ids : {&dense_ids, &sparse_ids}) {
      std::iota(ids->begin(), ids->end(), 0);
      std::shuffle(ids->begin(), ids->end(), random);
    }
  }

  // Stores a block of the plain cache. A sparse one loses, with its places in `plain`, two random elements of four.
  void store(int block, size_t table_entry, bool sparse, std::mt19937& random) {
    const size_t first = size_t(block) * kTokens * head_dim;
    if (!sparse) {
      const int id = dense_ids[block];
      std::copy_n(&plain[first], kTokens * head_dim, &dense[size_t(id) * kTokens * head_dim]);
      table[table_entry] = id + 1;
      return;
    }
    const int id = sparse_ids[block];
    table[table_entry] = -id - 1;
    std::fill_n(&metadata[id * kv::sparse_block_words(head_dim)], kv::sparse_block_words(head_dim), 0);
    const bool keys = kind == kv::KvOperand::keys;
    const int lines = keys ? kTokens : head_dim;  // along which four neighbours lie
    const int neighbours = keys ? head_dim : kTokens;
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
          const int at = keys ? kv::key_non_zero(line, 2 * four + place, head_dim)
                              : kv::value_non_zero(2 * four + place, line);
          non_zeros[id * kv::sparse_block_elements(head_dim) + at] = element;
        }
        const kv::Meta16Place place =
            keys ? kv::key_meta16(line, four / 4, head_dim) : kv::value_meta16(line, four / 4);
        metadata[id * kv::sparse_block_words(head_dim) + place.word] |=
            uint32_t(kept[1] << 2 | kept[0]) << (place.shift + four % 4 * 4);
      }
    }
  }
};

template <typename Element>
int run_case(const Case& test, std::mt19937& random) {
  std::normal_distribution<float> normal;
  const auto draw = [&](float factor) {
    return Element(test.exact ? float(int(random() % 5) - 2) : normal(random) * factor);
  };
  const int batch = static_cast<int>(test.sequences.size());
  std::vector<int> query_start{0};
  for (const Sequence& sequence : test.sequences)
    query_start.push_back(query_start.back() + sequence.queries);
  const int rows = query_start.back();

  // Slots in reverse order with a gap, blocks in random order with spare ones between.
  const int slot_count = batch + 1;
  std::vector<int> slots(batch), counts(slot_count * test.kv_heads, -1);
  int table_width = 1;
  int block_count = 2;
  for (int entry = 0; entry < batch; ++entry) {
    slots[entry] = batch - entry;
    for (int head = 0; head < test.kv_heads; ++head) {
      const int keys = std::max(0, test.sequences[entry].keys - (test.heads_differ ? 7 * head : 0));
      counts[slots[entry] * test.kv_heads + head] = keys;
      const int blocks = (keys + kTokens - 1) / kTokens;
      table_width = std::max(table_width, blocks);
      block_count += blocks;
    }
  }
  const size_t table_size = size_t(slot_count) * test.kv_heads * table_width;
  std::vector<int> plain_table(table_size, 0x7ffffff0), dense_table(table_size, 0x7ffffff0);
  Operand<Element> keys(kv::KvOperand::keys, test.head_dim, block_count, table_size, random);
  Operand<Element> values(kv::KvOperand::values, test.head_dim, block_count, table_size, random);
  int block = 0;
  for (int cache_head = 0; cache_head < slot_count * test.kv_heads; ++cache_head) {
    for (int first = 0; first < counts[cache_head]; first += kTokens, ++block) {
      const int tokens = std::min(kTokens, counts[cache_head] - first);
      for (int i = 0; i < tokens * test.head_dim; ++i) {
        const size_t at = size_t(block) * kTokens * test.head_dim + i;
        keys.plain[at] = draw(test.growing_scores ? 0.02f * (first + i / test.head_dim) : 1.0f);
        values.plain[at] = draw(1.0f);
        if (test.shift_scores && i % test.head_dim == 0) keys.plain[at] = Element(338.0f);
      }
      const size_t entry = size_t(cache_head) * table_width + first / kTokens;
      const bool full = tokens == kTokens;
      const auto chance = [&](double share) { return full && random() % 1000 < share * 1000; };
      keys.store(block, entry, chance(test.sparse_keys), random);
      values.store(block, entry, chance(test.sparse_values), random);
      plain_table[entry] = block;
      dense_table[entry] = block + 1;
    }
  }
  const size_t row_elements = size_t(test.query_heads) * test.head_dim;
  std::vector<Element> query(std::max<size_t>(1, rows * row_elements));
  for (Element& value : query) value = test.exact ? Element(0.0f) : draw(1.0f);
  for (size_t i = 0; test.exact && i < query.size(); i += test.head_dim) {
    // Two dims, so that weights differ by few powers of two.
    for (int j = 0; j < 2; ++j) query[i + random() % test.head_dim] = Element(1.0f);
  }
  if (test.shift_scores) {
    for (size_t i = 0; i < query.size(); i += test.head_dim) query[i] = Element(338.0f);
  }

  DeviceBuffer<Element> query_buffer(query), plain_keys(keys.plain), plain_values(values.plain),
      dense_keys(keys.dense), dense_values(values.dense), non_zero_keys(keys.non_zeros),
      non_zero_values(values.non_zeros);
  DeviceBuffer<uint32_t> key_metadata(keys.metadata), value_metadata(values.metadata);
  DeviceBuffer<int> plain_table_buffer(plain_table), dense_table_buffer(dense_table), key_table(keys.table),
      value_table(values.table), counts_buffer(counts), slots_buffer(slots), start_buffer(query_start);
  std::vector<uint16_t> poison((rows + kGuardRows) * row_elements, kPoison);
  DeviceBuffer<uint16_t> output_buffer(poison);
  DeviceBuffer<float> lse_buffer(std::vector<float>(size_t(rows + kGuardRows) * test.query_heads, NAN));

  kv::Attention24Arguments arguments;
  arguments.query = query_buffer.get();
  arguments.query_token_stride = arguments.output_token_stride = row_elements;
  arguments.query_head_stride = arguments.output_head_stride = test.head_dim;
  arguments.query_tokens = rows;
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype = test.dtype;
  arguments.output = output_buffer.get();
  arguments.log_sum_exp = lse_buffer.get();
  arguments.keys = dense_keys.get();
  arguments.values = dense_values.get();
  arguments.block_stride = int64_t{kTokens} * test.head_dim;
  arguments.token_stride = test.head_dim;
  arguments.block_tokens = kTokens;
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
  // With small integers, powers of two for weights.
  arguments.scale = test.exact ? 0.693147182f : 1.0f / std::sqrt(static_cast<float>(test.head_dim));
  arguments.causal = test.causal;
  arguments.sparse_keys = {non_zero_keys.get(), key_metadata.get(), block_count};
  arguments.sparse_values = {non_zero_values.get(), value_metadata.get(), block_count};

  DeviceBuffer<unsigned char> workspace(kv::kPrefill24WorkspaceBytes, 0x5a);
  const auto attend = [&] {
    check(test.ampere ? kv::sm80::prefill_attention_24(arguments, nullptr)
                      : kv::sm90a::prefill_attention_24(arguments, workspace.get(), nullptr));
    check(cudaDeviceSynchronize(), test.name.c_str());
  };
  // Twice: the second launch finds what the first one left in the workspace.
  attend();
  attend();
  const auto mixed_output = output_buffer.host();

  kv::PagedAttentionArguments plain = arguments;
  plain.keys = plain_keys.get();
  plain.values = plain_values.get();
  plain.block_table = plain_table_buffer.get();
  const int most_keys = *std::max_element(counts.begin(), counts.end());
  int failed = compare<Element>(test.name, plain, most_keys, output_buffer, lse_buffer);
  if (test.sparse_keys + test.sparse_values == 0.0) {
    const auto attend_plainly = [&](const kv::PagedAttentionArguments& dense, const int32_t* value_table) {
      check(test.ampere ? kv::sm80::prefill_attention(dense, value_table, nullptr)
                        : kv::sm90a::prefill_attention(dense, value_table, workspace.get(), nullptr));
      check(cudaDeviceSynchronize(), test.name.c_str());
      return output_buffer.host();
    };
    const bool same = attend_plainly(kv::as_plain_cache(arguments), arguments.value_table) ==
                      attend_plainly(plain, plain.block_table);
    std::printf("%s %s: as a plain cache\n", same ? "pass" : "FAIL", test.name.c_str());
    failed |= !same;
  }
  if (test.exact) {
    arguments.keys = plain_keys.get();
    arguments.values = plain_values.get();
    arguments.block_table = arguments.value_table = dense_table_buffer.get();
    attend();
    const bool same = output_buffer.host() == mixed_output;
    std::printf("%s %s: dense storage of the same\n", same ? "pass" : "FAIL", test.name.c_str());
    failed |= !same;
  }
  return failed;
}

std::vector<Case> cases(bool small_only) {
  std::vector<Case> list;
  const std::vector<Sequence> ragged{{1, 1},     {63, 63},   {64, 64},   {65, 130},
                                     {128, 128}, {129, 400}, {200, 200}, {513, 700}};
  const std::vector<Sequence> small{{70, 70}, {1, 200}, {130, 150}};
  const auto add = [&](std::string name, std::vector<Sequence> sequences, auto change) {
    for (const kv::DType dtype : {kv::DType::f16, kv::DType::bf16}) {
      for (const int head_dim : {128, 64}) {
        for (const bool ampere : {false, true}) {
          Case test;
          test.sequences = sequences;
          test.dtype = dtype;
          test.head_dim = head_dim;
          test.ampere = ampere;
          test.name = name + (ampere ? ", sm80" : "") + (dtype == kv::DType::f16 ? ", f16" : ", bf16") + " d" +
                      std::to_string(head_dim);
          change(test);
          list.push_back(test);
        }
      }
    }
  };
  add("small", small, [](Case&) {});
  add("small, all keys", small, [](Case& test) { test.causal = false; });
  if (small_only) return list;
  for (const double sparse_keys : {0.0, 0.5, 1.0}) {
    for (const double sparse_values : {0.0, 0.5, 1.0}) {
      const std::string name = "ragged, sparse keys " + std::to_string(sparse_keys).substr(0, 3) + ", values " +
                               std::to_string(sparse_values).substr(0, 3);
      const auto shares = [=](Case& test) {
        test.sparse_keys = sparse_keys;
        test.sparse_values = sparse_values;
      };
      add(name, ragged, shares);
      add("small integers" + name.substr(6), {{300, 300}, {100, 720}}, [=](Case& test) {
        shares(test);
        test.exact = true;
      });
    }
  }
  add("ragged, all keys", ragged, [](Case& test) { test.causal = false; });
  for (const int group : {1, 3, 8, 16}) {
    add(std::to_string(group) + " heads a group", ragged, [=](Case& test) { test.query_heads = 2 * group; });
  }
  add("heads keep different counts", {{100, 400}, {300, 500}}, [](Case& test) {
    test.kv_heads = 4;
    test.heads_differ = true;
  });
  add("queries that see no key", {{100, 40}, {150, 0}, {300, 10}, {20, 20}}, [](Case&) {});
  add("no keys, all keys asked for", {{100, 0}, {20, 20}}, [](Case& test) { test.causal = false; });
  add("no queries between", {{0, 50}, {70, 70}, {0, 0}, {5, 300}}, [](Case&) {});
  add("shifted by 1e4", {{300, 900}}, [](Case& test) { test.shift_scores = true; });
  add("growing maxima", {{256, 1500}}, [](Case& test) {
    test.growing_scores = true;
    test.causal = false;
  });
  add("chunk at the end of many keys", {{130, 6000}}, [](Case&) {});
  return list;
}

}  // namespace

// For torch-prefill-24.py. `sizes`: kernel (0 for sm_90a, 1 for sm_80), rows, batch, query heads, kv heads, head
// dim, table width, causal, bf16, dense blocks, sparse blocks. `pointers`: query, output, dense keys, dense values,
// non-zeros and metadata of keys, of values, table of keys, of values, counts, slots, query start, workspace. Tensors
// are contiguous. Returns 0, or prints why not.
extern "C" int kv_prefill_24(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
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
  arguments.block_tokens = kTokens;
  arguments.query_token_stride = arguments.output_token_stride = sizes[3] * sizes[5];
  arguments.query_head_stride = arguments.output_head_stride = arguments.token_stride = sizes[5];
  arguments.block_stride = sizes[5] * kTokens;
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
  if (!status.ok()) std::printf("%s\n", status.message.c_str());
  return status.ok() ? 0 : 1;
}

// usage: prefill-24-bench [small] [seed]
int main(int argc, char** argv) {
  const bool small_only = argc > 1 && std::string(argv[1]) == "small";
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : std::random_device{}();
  std::mt19937 random(seed);
  int failed = 0;
  const std::vector<Case> list = cases(small_only);
  for (const Case& test : list) {
    failed +=
        test.dtype == kv::DType::f16 ? run_case<__half>(test, random) : run_case<__nv_bfloat16>(test, random);
  }
  std::printf("tests: %d passed, %d failed, 0 skipped (seed %u)\n", static_cast<int>(list.size()) - failed,
              failed, seed);
  return failed == 0 ? 0 : 1;
}
