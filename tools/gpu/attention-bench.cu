// Checks the CUDA attention kernels against a float64 reference, with nothing but a driver: random inputs,
// NaN in every cache row that holds no key, poisoned outputs. Built as a shared library, it is what
// torch-attention.py times next to PyTorch. README.md says how to build both.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention-compare.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "runtime/fault.h"

namespace {

struct Case {
  std::string name;
  std::vector<Sequence> sequences;
  int query_heads = 8;
  int kv_heads = 2;
  int head_dim = 128;
  int block_tokens = 64;
  kv::DType dtype = kv::DType::f16;
  bool causal = true;
  bool decode = false;
  bool ampere = false;          // prefill with the kernel that sm_80 takes, instead of sm_90a's
  bool heads_differ = false;    // kv head h keeps 7 * h keys fewer
  bool shift_scores = false;    // by about 1e4
  bool growing_scores = false;  // later keys score higher and higher, so that running maxima keep moving
  kv::FaultCode outside = kv::FaultCode::none;  // decode with a table that leads outside in this way
};

template <typename Element>
int run_case(const Case& test, std::mt19937& random) {
  std::normal_distribution<float> normal;
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
      const int blocks = (keys + test.block_tokens - 1) / test.block_tokens;
      table_width = std::max(table_width, blocks);
      block_count += blocks;
    }
  }
  std::vector<int> order(block_count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<int> table(size_t(slot_count) * test.kv_heads * table_width, 0x7ffffff0);
  const size_t block_elements = size_t(test.block_tokens) * test.head_dim;
  std::vector<Element> keys(block_count * block_elements), values(keys.size());
  const Element nan = Element(NAN);
  std::fill(keys.begin(), keys.end(), nan);
  std::fill(values.begin(), values.end(), nan);
  int next = 0;
  for (int slot = 0; slot < slot_count; ++slot) {
    for (int head = 0; head < test.kv_heads; ++head) {
      const int count = counts[slot * test.kv_heads + head];
      for (int key = 0; key < count; ++key) {
        int& block = table[(size_t(slot) * test.kv_heads + head) * table_width + key / test.block_tokens];
        if (key % test.block_tokens == 0) block = order[next++];
        const size_t at = block * block_elements + size_t(key % test.block_tokens) * test.head_dim;
        const float growth = test.growing_scores ? 0.02f * key : 1.0f;
        for (int dim = 0; dim < test.head_dim; ++dim) {
          keys[at + dim] = Element(normal(random) * growth);
          values[at + dim] = Element(normal(random));
        }
        if (test.shift_scores) keys[at] = Element(338.0f);
      }
    }
  }
  const size_t row_elements = size_t(test.query_heads) * test.head_dim;
  std::vector<Element> query(std::max<size_t>(1, rows * row_elements));
  for (Element& value : query) value = Element(normal(random));
  if (test.shift_scores) {
    for (size_t i = 0; i < query.size(); i += test.head_dim) query[i] = Element(338.0f);
  }

  for (const int head : {0, test.kv_heads - 1}) {
    const int cache_head = slots[0] * test.kv_heads + head;
    if (test.outside == kv::FaultCode::cache_overflow) counts[cache_head] = head == 0 ? -1 : 1 << 30;
    if (test.outside == kv::FaultCode::block_out_of_range) {
      table[size_t(cache_head) * table_width] = head == 0 ? -7 : block_count;
    }
  }
  if (test.outside == kv::FaultCode::slot_out_of_range) slots[batch - 1] = slot_count;
  if (test.outside == kv::FaultCode::rows_not_ascending) query_start[batch] = 1 << 30;

  DeviceBuffer<Element> query_buffer(query), keys_buffer(keys), values_buffer(values);
  DeviceBuffer<int> table_buffer(table), counts_buffer(counts), slots_buffer(slots),
      start_buffer(query_start);
  std::vector<uint16_t> poison((rows + kGuardRows) * row_elements, kPoison);
  DeviceBuffer<uint16_t> output_buffer(poison);
  DeviceBuffer<float> lse_buffer(std::vector<float>(size_t(rows + kGuardRows) * test.query_heads, NAN));

  kv::PagedAttentionArguments arguments;
  arguments.query = query_buffer.get();
  arguments.query_token_stride = row_elements;
  arguments.query_head_stride = test.head_dim;
  arguments.query_tokens = rows;
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype = test.dtype;
  arguments.output = output_buffer.get();
  arguments.output_token_stride = row_elements;
  arguments.output_head_stride = test.head_dim;
  arguments.log_sum_exp = lse_buffer.get();
  arguments.keys = keys_buffer.get();
  arguments.values = values_buffer.get();
  arguments.block_stride = block_elements;
  arguments.token_stride = test.head_dim;
  arguments.block_tokens = test.block_tokens;
  arguments.block_count = block_count;
  arguments.slot_count = slot_count;
  arguments.block_table = table_buffer.get();
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

  kv::cuda::DecodeAttentionMemory memory{0, kv::kPrefillAttentionWorkspaceBytes};
  if (test.decode) check(kv::cuda::decode_attention_memory(arguments, &memory));
  DeviceBuffer<unsigned char> counters(memory.counter_bytes);
  DeviceBuffer<unsigned char> workspace(memory.workspace_bytes, 0x5a);
  DeviceBuffer<kv::Fault> fault(1);
  std::vector<uint16_t> first_output;
  std::vector<float> first_lse;
  // Twice: the second launch finds what the first one left in counters and workspace, and gives the same bits.
  for (int launch = 0; launch < 2; ++launch) {
    check(test.decode   ? kv::cuda::decode_attention(arguments, arguments.block_table, counters.get(), workspace.get(),
                                                     {fault.get()}, nullptr)
          : test.ampere ? kv::sm80::prefill_attention(arguments, arguments.block_table, nullptr)
                        : kv::sm90a::prefill_attention(arguments, arguments.block_table, workspace.get(), nullptr));
    check(cudaDeviceSynchronize(), test.name.c_str());
    if (launch > 0) continue;
    first_output = output_buffer.host();
    first_lse = lse_buffer.host();
  }
  const kv::FaultCode found = fault.host()[0].code;
  if (found != test.outside) {
    std::printf("FAIL %-58s fault %d\n", test.name.c_str(), static_cast<int>(found));
    return 1;
  }
  const auto counts_left = counters.host();
  if (std::count(counts_left.begin(), counts_left.end(), 0) != static_cast<long>(counts_left.size())) {
    std::printf("FAIL %-58s leaves counters\n", test.name.c_str());
    return 1;
  }
  if (test.outside != kv::FaultCode::none) {
    std::printf("pass %s\n", test.name.c_str());
    return 0;
  }
  const auto second_lse = lse_buffer.host();
  if (output_buffer.host() != first_output ||
      std::memcmp(second_lse.data(), first_lse.data(), first_lse.size() * sizeof(float)) != 0) {
    std::printf("FAIL %-58s two launches differ\n", test.name.c_str());
    return 1;
  }

  const int most_keys = *std::max_element(counts.begin(), counts.end());
  return compare<Element>(test.name, arguments, most_keys, output_buffer, lse_buffer);
}

std::vector<Case> cases(bool small_only) {
  std::vector<Case> list;
  const std::vector<Sequence> ragged{{1, 1},     {63, 63},   {64, 64},   {65, 130},
                                     {128, 128}, {129, 400}, {200, 200}, {513, 700}};
  const std::vector<Sequence> small{{70, 70}, {1, 200}, {130, 150}};
  const auto add = [&](std::string name, std::vector<Sequence> sequences, auto change) {
    for (const kv::DType dtype : {kv::DType::f16, kv::DType::bf16}) {
      for (const int head_dim : {128, 64}) {
        Case test;
        test.sequences = sequences;
        test.dtype = dtype;
        test.head_dim = head_dim;
        change(test);
        const std::string suffix =
            name + (dtype == kv::DType::f16 ? " f16" : " bf16") + " d" + std::to_string(head_dim);
        test.name = (test.decode ? "decode " : "prefill ") + suffix;
        list.push_back(test);
        if (test.decode) continue;
        test.ampere = true;
        test.name = "prefill sm80 " + suffix;
        list.push_back(test);
      }
    }
  };
  add("small", small, [](Case&) {});
  add("small, all keys", small, [](Case& test) { test.causal = false; });
  const auto decode_of = [](std::vector<int> keys) {
    std::vector<Sequence> sequences;
    for (const int count : keys) sequences.push_back({1, count});
    return sequences;
  };
  add("small", decode_of({1, 64, 200}), [](Case& test) { test.decode = true; });
  for (const auto& [name, code] : std::vector<std::pair<std::string, kv::FaultCode>>{
           {"counts", kv::FaultCode::cache_overflow},
           {"blocks", kv::FaultCode::block_out_of_range},
           {"slots", kv::FaultCode::slot_out_of_range},
           {"rows", kv::FaultCode::rows_not_ascending}}) {
    add(name + " that lead outside", decode_of({200, 1, 64}), [code = code](Case& test) {
      test.decode = true;
      test.outside = code;
    });
  }
  if (small_only) return list;
  add("ragged", ragged, [](Case&) {});
  add("ragged, all keys", ragged, [](Case& test) { test.causal = false; });
  for (const int block : {8, 16, 32, 128, 192, 1024}) {
    add("blocks of " + std::to_string(block), ragged, [=](Case& test) { test.block_tokens = block; });
  }
  add("one head a group", ragged, [](Case& test) { test.kv_heads = 8; });
  add("one kv head", ragged, [](Case& test) { test.kv_heads = 1; });
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
  const auto decoding = [](auto change) {
    return [=](Case& test) {
      test.decode = true;
      change(test);
    };
  };
  const auto lengths = decode_of({1, 15, 16, 17, 63, 64, 65, 1000, 4000, 0, 333});
  add("ragged", lengths, decoding([](Case&) {}));
  for (const int block : {16, 128, 1024}) {
    add("blocks of " + std::to_string(block), lengths,
        decoding([=](Case& test) { test.block_tokens = block; }));
  }
  for (const int heads : {1, 7, 8, 16, 24, 32}) {
    add(std::to_string(heads) + " heads a group", lengths,
        decoding([=](Case& test) { test.query_heads = 2 * heads; }));
  }
  add("heads keep different counts", lengths, decoding([](Case& test) {
        test.kv_heads = 4;
        test.heads_differ = true;
      }));
  add("one long sequence", decode_of({16000}), decoding([](Case&) {}));
  add("long sequences", decode_of({9000, 16000, 12345, 64, 8000}), decoding([](Case& test) { test.kv_heads = 8; }));
  add("many short sequences", decode_of(std::vector<int>(300, 70)), decoding([](Case&) {}));
  add("shifted by 1e4", decode_of({900, 5000}), decoding([](Case& test) { test.shift_scores = true; }));
  const std::vector<Sequence> few{{3, 100}, {0, 50}, {1, 2000}, {5, 5}, {2, 1}, {4, 700}};
  add("a few queries each", few, decoding([](Case&) {}));
  add("a few queries each, all keys", few, decoding([](Case& test) { test.causal = false; }));
  add("growing maxima", decode_of({1500}), decoding([](Case& test) { test.growing_scores = true; }));
  return list;
}

}  // namespace

// For torch-attention.py. `sizes`: kernel (0 prefill, 1 decode, 2 prefill for sm_80), rows, batch, query
// heads, kv heads, head dim, block tokens, table width, causal, bf16, blocks. `pointers`: query, output,
// log-sum-exp, keys, values, table, counts, slots, query start, workspace, counters. Tensors are contiguous.
// Returns 0, or prints why not.
extern "C" int kv_attention(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::PagedAttentionArguments arguments;
  const int64_t kernel = sizes[0];
  arguments.query_tokens = static_cast<int32_t>(sizes[1]);
  arguments.batch = static_cast<int32_t>(sizes[2]);
  arguments.query_heads = static_cast<int32_t>(sizes[3]);
  arguments.kv_heads = static_cast<int32_t>(sizes[4]);
  arguments.head_dim = static_cast<int32_t>(sizes[5]);
  arguments.block_tokens = static_cast<int32_t>(sizes[6]);
  arguments.table_width = static_cast<int32_t>(sizes[7]);
  arguments.causal = sizes[8] != 0;
  arguments.query_dtype = arguments.output_dtype = arguments.cache_dtype =
      sizes[9] ? kv::DType::bf16 : kv::DType::f16;
  arguments.block_count = static_cast<int32_t>(sizes[10]);
  arguments.slot_count = arguments.batch;
  arguments.query_token_stride = arguments.output_token_stride = sizes[3] * sizes[5];
  arguments.query_head_stride = arguments.output_head_stride = sizes[5];
  arguments.token_stride = sizes[5];
  arguments.block_stride = sizes[5] * sizes[6];
  arguments.query = pointers[0];
  arguments.output = pointers[1];
  arguments.log_sum_exp = static_cast<float*>(pointers[2]);
  arguments.keys = pointers[3];
  arguments.values = pointers[4];
  arguments.block_table = static_cast<const int32_t*>(pointers[5]);
  arguments.key_counts = static_cast<int32_t*>(pointers[6]);
  arguments.slots = static_cast<const int32_t*>(pointers[7]);
  arguments.query_start = static_cast<const int32_t*>(pointers[8]);
  arguments.scale = scale;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  static const DeviceBuffer<kv::Fault> fault(1);
  const kv::Status status =
      kernel == 1   ? kv::cuda::decode_attention(arguments, arguments.block_table, pointers[10], pointers[9],
                                                 {fault.get()}, cuda_stream)
      : kernel == 2 ? kv::sm80::prefill_attention(arguments, arguments.block_table, cuda_stream)
                    : kv::sm90a::prefill_attention(arguments, arguments.block_table, pointers[9], cuda_stream);
  if (!status.ok()) std::printf("%s\n", status.message.c_str());
  return status.ok() ? 0 : 1;
}

// usage: attention-bench [all|small|decode|small-decode] [seed]
int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "all";
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : std::random_device{}();
  std::mt19937 random(seed);
  int passed = 0;
  int failed = 0;
  for (const Case& test : cases(mode.find("small") != std::string::npos)) {
    if (mode.find("decode") != std::string::npos && !test.decode) continue;
    const int result =
        test.dtype == kv::DType::f16 ? run_case<__half>(test, random) : run_case<__nv_bfloat16>(test, random);
    failed += result;
    passed += 1 - result;
  }
  std::printf("tests: %d passed, %d failed, 0 skipped (seed %u)\n", passed, failed, seed);
  return failed == 0 ? 0 : 1;
}
