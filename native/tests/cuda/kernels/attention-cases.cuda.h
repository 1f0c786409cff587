// What the cases of the attention kernels share: ragged batches over a paged cache, and what lies around it.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"

namespace kv::tests {

constexpr int kGuardRows = 3;            // poisoned rows behind the outputs
constexpr uint16_t kPoison = 0x7fff;     // NaN in f16 and bf16
constexpr int kNoBlock = 0x7ffffff0;     // of a table's entries that no key needs
constexpr float kLargeElement = 338.0f;  // two of them shift a score by about 1e4

struct Sequence {
  int queries;
  int keys;
};

struct AttentionCase {
  std::string name;
  std::vector<Sequence> sequences;
  int query_heads = 8;
  int kv_heads = 2;
  int head_dim = 128;
  int block_tokens = 64;
  DType dtype = DType::f16;
  bool causal = true;
  bool ampere = false;          // the kernel that sm_80 takes, instead of sm_90a's
  bool heads_differ = false;    // kv head h keeps 7 * h keys fewer
  bool shift_scores = false;    // by about 1e4
  float growth = 0;             // > 0: later keys score higher and higher, so that running maxima keep moving
};

inline std::vector<Sequence> decode_of(const std::vector<int>& keys) {
  std::vector<Sequence> sequences;
  for (const int count : keys) sequences.push_back({1, count});
  return sequences;
}

inline std::vector<Sequence> small_prompts() { return {{70, 70}, {1, 200}, {130, 150}}; }

inline std::vector<Sequence> ragged_prompts() {
  return {{1, 1}, {63, 63}, {64, 64}, {65, 130}, {128, 128}, {129, 400}, {200, 200}, {513, 700}};
}

inline std::vector<Sequence> few_queries_each() { return {{3, 100}, {0, 50}, {1, 2000}, {5, 5}, {2, 1}, {4, 700}}; }

// What `change` makes of a case of both dtypes, both head sizes, and the kernels asked for.
template <class Case>
class CaseList {
 public:
  explicit CaseList(bool with_ampere) : with_ampere_(with_ampere) {}

  template <class Change>
  void add(const std::string& name, const std::vector<Sequence>& sequences, Change change) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      for (const int head_dim : {128, 64}) {
        for (const bool ampere : {false, true}) {
          if (ampere && !with_ampere_) continue;
          Case test;
          test.name = name + (dtype == DType::f16 ? ", f16" : ", bf16") + " d" + std::to_string(head_dim) +
                      (ampere ? ", sm80" : "");
          test.sequences = sequences;
          test.dtype = dtype;
          test.head_dim = head_dim;
          test.ampere = ampere;
          change(test);
          cases.push_back(test);
        }
      }
    }
  }

  void add(const std::string& name, const std::vector<Sequence>& sequences) {
    add(name, sequences, [](Case&) {});
  }

  std::vector<Case> cases;

 private:
  bool with_ampere_;
};

// Prompts that prefill over dense and over 2:4 blocks must both get right.
template <class Case>
void add_unusual_prompts(CaseList<Case>& list) {
  list.add("heads keep different counts", {{100, 400}, {300, 500}}, [](Case& test) {
    test.kv_heads = 4;
    test.heads_differ = true;
  });
  list.add("queries that see no key", {{100, 40}, {150, 0}, {300, 10}, {20, 20}});
  list.add("no keys, all keys asked for", {{100, 0}, {20, 20}}, [](Case& test) { test.causal = false; });
  list.add("no queries between", {{0, 50}, {70, 70}, {0, 0}, {5, 300}});
  list.add("shifted by 1e4", {{300, 900}}, [](Case& test) { test.shift_scores = true; });
  list.add("growing maxima", {{256, 1500}}, [](Case& test) {
    test.growth = 0.02f;
    test.causal = false;
  });
  // By more than 2^126 from one block to the next: f32 has no factor as small.
  list.add("leaping maxima", {{256, 600}}, [](Case& test) {
    test.growth = 0.6f;
    test.causal = false;
  });
  list.add("chunk at the end of many keys", {{130, 6000}});
}

// Where the sequences of a case lie: in slots in reverse order with a gap, and with spare blocks.
struct BatchLayout {
  std::vector<int> query_start{0};
  std::vector<int> slots;
  std::vector<int> counts;  // [slot, kv_head]
  int rows = 0;
  int slot_count;
  int table_width = 1;
  int block_count = 2;

  explicit BatchLayout(const AttentionCase& test)
      : slots(test.sequences.size()), slot_count(static_cast<int>(slots.size()) + 1) {
    counts.assign(static_cast<size_t>(slot_count) * test.kv_heads, -1);
    for (size_t entry = 0; entry < slots.size(); ++entry) {
      rows += test.sequences[entry].queries;
      query_start.push_back(rows);
      slots[entry] = static_cast<int>(slots.size() - entry);
      for (int head = 0; head < test.kv_heads; ++head) {
        const int keys = std::max(0, test.sequences[entry].keys - (test.heads_differ ? 7 * head : 0));
        counts[slots[entry] * test.kv_heads + head] = keys;
        const int blocks = (keys + test.block_tokens - 1) / test.block_tokens;
        table_width = std::max(table_width, blocks);
        block_count += blocks;
      }
    }
  }

  size_t table_size() const { return counts.size() * table_width; }
  int most_keys() const { return *std::max_element(counts.begin(), counts.end()); }
};

// Makes the tables lead outside in this way: at the first and at the last kv head of the first entry, or behind the last.
inline void lead_outside(const AttentionCase& test, std::optional<PagedFault> outside, BatchLayout& layout, std::vector<int>& table) {
  for (const int head : {0, test.kv_heads - 1}) {
    const int cache_head = layout.slots[0] * test.kv_heads + head;
    if (outside == PagedFault::cache_overflow) layout.counts[cache_head] = head == 0 ? -test.block_tokens : 1 << 30;
    if (outside == PagedFault::part_of_block) layout.counts[cache_head] = head == 0 ? 63 : 65;
    if (outside == PagedFault::block_out_of_range) {
      table[size_t(cache_head) * layout.table_width] = head == 0 ? -7 : layout.block_count;
    }
  }
  if (outside == PagedFault::slot_out_of_range) layout.slots.back() = layout.slot_count;
  if (outside == PagedFault::rows_not_ascending) layout.query_start.back() = 1 << 30;
}

// The blocks of keys and values, in random order; what holds no key is NaN.
template <typename Element>
struct PagedCache {
  std::vector<int> table;
  std::vector<Element> keys, values;

  PagedCache(const AttentionCase& test, const BatchLayout& layout, Random& random)
      : table(layout.table_size(), kNoBlock),
        keys(size_t(layout.block_count) * test.block_tokens * test.head_dim, Element(NAN)),
        values(keys) {
    std::normal_distribution<float> normal;
    const std::vector<int> order = shuffled(layout.block_count, random);
    int next = 0;
    for (size_t cache_head = 0; cache_head < layout.counts.size(); ++cache_head) {
      for (int key = 0; key < layout.counts[cache_head]; ++key) {
        int& block = table[cache_head * layout.table_width + key / test.block_tokens];
        if (key % test.block_tokens == 0) block = order[next++];
        const size_t at = (size_t(block) * test.block_tokens + key % test.block_tokens) * test.head_dim;
        const float growth = test.growth > 0 ? test.growth * key : 1.0f;
        for (int dim = 0; dim < test.head_dim; ++dim) {
          keys[at + dim] = Element(normal(random) * growth);
          values[at + dim] = Element(normal(random));
        }
        if (test.shift_scores) keys[at] = Element(kLargeElement);
      }
    }
  }
};

template <typename Element>
std::vector<Element> random_query(const AttentionCase& test, int rows, Random& random) {
  std::normal_distribution<float> normal;
  std::vector<Element> query(static_cast<size_t>(rows) * test.query_heads * test.head_dim);
  for (Element& value : query) value = Element(normal(random));
  for (size_t i = 0; test.shift_scores && i < query.size(); i += test.head_dim) query[i] = Element(kLargeElement);
  return query;
}

// All that an attention kernel takes beside the cache, on the device.
template <typename Element>
class AttentionOperands {
 public:
  AttentionOperands(const AttentionCase& test, const BatchLayout& layout, const std::vector<Element>& query)
      : output(std::vector<uint16_t>(size_t(layout.rows + kGuardRows) * test.query_heads * test.head_dim, kPoison)),
        log_sum_exp(std::vector<float>(size_t(layout.rows + kGuardRows) * test.query_heads, NAN)),
        query_(query),
        counts_(layout.counts),
        slots_(layout.slots),
        query_start_(layout.query_start) {
    arguments_.query = query_.get();
    arguments_.query_token_stride = arguments_.output_token_stride = int64_t{test.query_heads} * test.head_dim;
    arguments_.query_head_stride = arguments_.output_head_stride = arguments_.token_stride = test.head_dim;
    arguments_.query_tokens = layout.rows;
    arguments_.query_dtype = arguments_.output_dtype = arguments_.cache_dtype = test.dtype;
    arguments_.output = output.get();
    arguments_.log_sum_exp = log_sum_exp.get();
    arguments_.block_stride = int64_t{test.block_tokens} * test.head_dim;
    arguments_.block_tokens = test.block_tokens;
    arguments_.block_count = layout.block_count;
    arguments_.slot_count = layout.slot_count;
    arguments_.table_width = layout.table_width;
    arguments_.key_counts = counts_.get();
    arguments_.slots = slots_.get();
    arguments_.query_start = query_start_.get();
    arguments_.batch = static_cast<int32_t>(layout.slots.size());
    arguments_.query_heads = test.query_heads;
    arguments_.kv_heads = test.kv_heads;
    arguments_.head_dim = test.head_dim;
    arguments_.scale = 1.0f / std::sqrt(static_cast<float>(test.head_dim));
    arguments_.causal = test.causal;
  }

  // Without the pools and the block table.
  const PagedAttentionArguments& arguments() const { return arguments_; }

  // Launches twice: the second launch finds what the first one left in counters and workspace. Returns whether both
  // gave the same bits.
  template <class Launch>
  bool repeats(Launch launch) const {
    const auto run = [&] {
      succeeds(launch());
      succeeds(cudaDeviceSynchronize());
      return std::make_pair(output.host(), log_sum_exp.host());
    };
    const auto first = run();
    const auto second = run();
    return first.first == second.first &&
           std::memcmp(first.second.data(), second.second.data(), first.second.size() * sizeof(float)) == 0;
  }

  DeviceBuffer<uint16_t> output;
  DeviceBuffer<float> log_sum_exp;

 private:
  DeviceBuffer<Element> query_;
  DeviceBuffer<int> counts_, slots_, query_start_;
  PagedAttentionArguments arguments_;
};

}  // namespace kv::tests
