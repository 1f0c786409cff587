// Decode attention over quantized blocks against float64 over what the codes stand for: random codes and scales, blocks
// that no slot has full of NaN, poisoned outputs.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "kernels/decode-attention-quantized/decode-attention-quantized.cuda.h"
#include "shared/paged/paged-faults.h"
#include "shared/quantized-blocks/quantized-blocks.h"
#include "tests/cuda/kernels/attention-cases.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/kernel-testing.h"

namespace kv::tests {
namespace {

struct Case : AttentionCase {
  Case() { causal = false; }

  int key_bits = 8;
  int value_bits = 8;
  int scale_spread = 24;              // of the bytes of scales
  bool any_shape = false;             // the kernel of all shapes
  std::optional<PagedFault> outside;  // a table that leads outside in this way
};

// Blocks of random codes. The scales of keys give numbers of about 1, those of blocks that nobody has are NaN.
struct QuantizedPool {
  QuantizedPool(const Case& test, int bits, int blocks, Random& random)
      : head_dim(test.head_dim), bits(bits), bytes(blocks * quantized_block_bytes(head_dim, bits)) {
    const int64_t block_bytes = quantized_block_bytes(head_dim, bits);
    for (size_t i = 0; i < bytes.size(); ++i) {
      const bool scale = static_cast<int64_t>(i) % block_bytes >= scale_offset(head_dim, bits);
      const int middle = (bits == 8 ? 0x60 : 0x78) + (test.shift_scores ? 24 : 0);
      bytes[i] = scale ? middle + pick(random, -test.scale_spread, test.scale_spread) : pick(random, 0, 255);
      if (!scale && bits == 8 && bytes[i] == 0x80) bytes[i] = 0;
    }
  }

  void poison(int block) {
    const int64_t first = block * quantized_block_bytes(head_dim, bits);
    std::fill_n(bytes.begin() + first + scale_offset(head_dim, bits), 64 * quantized_groups(head_dim), kNanScale);
  }

  double number(int block, int token, int dim) const {
    const uint8_t* from = bytes.data() + block * quantized_block_bytes(head_dim, bits);
    const int group = dim / 32;
    const uint8_t scale = from[scale_offset(head_dim, bits) + token * quantized_groups(head_dim) + group];
    const double step = elements::half_to_float(static_cast<uint16_t>(scale << 7)) / 16.0;
    const uint8_t* row = from + token * code_row_bytes(head_dim, bits);
    if (bits == 8) return static_cast<int8_t>(row[dim]) * step;
    return ((row[group * 16 + dim % 16] >> (dim % 32 / 16 * 4) & 15) - 7.5) * step;
  }

  int head_dim;
  int bits;
  std::vector<uint8_t> bytes;
};

// row = H row / sqrt(n), with the signs before it, or after it.
void rotate(std::vector<double>& row, bool back) {
  const int dims = static_cast<int>(row.size());
  const int run = rotation_run(dims);
  const auto apply_signs = [&] {
    for (int dim = 0; dim < dims; ++dim) row[dim] *= rotation_negates(dim) ? -1 : 1;
  };
  if (!back) apply_signs();
  for (int stride = 1; stride < run; stride *= 2) {
    for (int dim = 0; dim < dims; ++dim) {
      if (dim & stride) continue;
      const double a = row[dim], b = row[dim + stride];
      row[dim] = a + b;
      row[dim + stride] = a - b;
    }
  }
  for (double& x : row) x /= std::sqrt(static_cast<double>(run));
  if (back) apply_signs();
}

// The largest excess of an error over what the kernel's arithmetic allows.
struct Excess {
  double output = -1, log_sum_exp = -1;
  int bad = 0;
};

template <typename Element>
void compare_row(const Case& test, const QuantizedPool& keys, const QuantizedPool& values, const int* blocks, int count,
                 const Element* query, const Element* output, float log_sum_exp, double scale, Excess& excess) {
  const int dims = test.head_dim;
  std::vector<double> row(dims);
  for (int dim = 0; dim < dims; ++dim) row[dim] = static_cast<float>(query[dim]);
  rotate(row, false);
  double largest_query = 0;
  for (const double x : row) largest_query = std::max(largest_query, std::abs(x));
  std::vector<double> scores(count);
  double largest = -INFINITY, score_error = 0;
  for (int key = 0; key < count; ++key) {
    double score = 0, key_sum = 0, magnitude = 0;
    for (int dim = 0; dim < dims; ++dim) {
      const double number = keys.number(blocks[key / 64], key % 64, dim);
      score += row[dim] * number;
      key_sum += std::abs(number);
      magnitude += std::abs(row[dim] * number);
    }
    scores[key] = score * scale;
    largest = std::max(largest, scores[key]);
    // The query has 16 bits of its largest number; a few roundings of f32 follow for each group and for its rotation.
    score_error = std::max(score_error, scale * (largest_query * 0x1p-16 * key_sum + 0x1p-19 * magnitude));
  }
  std::vector<double> exact(dims), magnitudes(dims);
  double sum = 0;
  for (int key = 0; key < count; ++key) {
    const double weight = std::exp(scores[key] - largest);
    sum += weight;
    for (int dim = 0; dim < dims; ++dim) {
      const double number = values.number(blocks[key / 64], key % 64, dim);
      exact[dim] += weight * number;
      magnitudes[dim] += weight * std::abs(number);
    }
  }
  double norm = 0;
  for (int dim = 0; dim < dims && count > 0; ++dim) {
    exact[dim] /= sum;
    norm += magnitudes[dim] / sum * (magnitudes[dim] / sum);
  }
  rotate(exact, true);
  for (int dim = 0; dim < dims; ++dim) {
    const double got = static_cast<float>(output[dim]);
    // Weights have 11 bits, of which one is lost where they lag behind the maximum, and errors of scores count twice.
    const double allowed = (0x1p-10 + 2 * score_error + 0x1p-16) * std::sqrt(norm) +
                           unit_roundoff(test.dtype) * std::abs(exact[dim]) + 0x1p-20;
    if (!(std::abs(got - exact[dim]) < INFINITY)) ++excess.bad;
    excess.output = std::max(excess.output, (std::abs(got - exact[dim]) - allowed) / allowed);
  }
  if (count == 0) {
    excess.bad += log_sum_exp != -INFINITY;
    return;
  }
  const double wanted = largest + std::log(sum);
  const double allowed = score_error + 1e-5 * (1 + std::abs(wanted));
  if (!(std::abs(log_sum_exp - wanted) < INFINITY)) ++excess.bad;
  excess.log_sum_exp = std::max(excess.log_sum_exp, (std::abs(log_sum_exp - wanted) - allowed) / allowed);
}

template <typename Element>
Outcome attend(const Case& test, Random& random) {
  BatchLayout layout(test);
  QuantizedPool keys(test, test.key_bits, layout.block_count, random);
  QuantizedPool values(test, test.value_bits, layout.block_count, random);
  std::vector<int> table(layout.table_size(), kNoBlock);
  const std::vector<int> order = shuffled(layout.block_count, random);
  int next = 0;
  for (size_t cache_head = 0; cache_head < layout.counts.size(); ++cache_head) {
    for (int block = 0; block * 64 < layout.counts[cache_head]; ++block) {
      table[cache_head * layout.table_width + block] = order[next++];
    }
  }
  for (; next < layout.block_count; ++next) {
    keys.poison(order[next]);
    values.poison(order[next]);
  }
  lead_outside(test, test.outside, layout, table);
  const std::vector<Element> query = random_query<Element>(test, layout.rows, random);
  const AttentionOperands<Element> operands(test, layout, query);
  const DeviceBuffer<uint8_t> key_pool(keys.bytes), value_pool(values.bytes);
  const DeviceBuffer<int> device_table(table);
  QuantizedAttentionArguments arguments;
  static_cast<PagedAttentionArguments&>(arguments) = operands.arguments();
  arguments.keys = key_pool.get();
  arguments.values = value_pool.get();
  arguments.block_table = device_table.get();
  arguments.key_bits = test.key_bits;
  arguments.value_bits = test.value_bits;

  DecodeAttentionMemory memory{};
  succeeds(cuda::decode_attention_quantized_memory(arguments, &memory));
  const DeviceBuffer<unsigned char> counters(memory.counter_bytes), workspace(memory.workspace_bytes, 0x5a);
  const DeviceBuffer<Fault> fault(1);
  const auto launch = [&] {
    return test.any_shape ? cuda::decode_attention_quantized_any(arguments, nullptr)
                          : cuda::decode_attention_quantized(arguments, counters.get(), workspace.get(), {fault.get()},
                                                             nullptr);
  };
  const bool same = operands.repeats(launch);

  Outcome outcome;
  const int32_t found = fault.host()[0].code;
  outcome.expect(found == (test.outside ? static_cast<int32_t>(*test.outside) : 0), "fault " + std::to_string(found));
  outcome.expect(counters.host() == std::vector<unsigned char>(memory.counter_bytes), "leaves counters");
  if (test.outside) return outcome;
  outcome.expect(same, "two launches differ");
  const auto output = operands.output.host();
  const auto log_sum_exp = operands.log_sum_exp.host();
  Excess excess;
  for (size_t entry = 0; entry < layout.slots.size(); ++entry) {
    for (int token = layout.query_start[entry]; token < layout.query_start[entry + 1]; ++token) {
      for (int head = 0; head < test.query_heads; ++head) {
        const int cache_head = layout.slots[entry] * test.kv_heads + head / (test.query_heads / test.kv_heads);
        const int row = token * test.query_heads + head;
        compare_row(test, keys, values, &table[size_t(cache_head) * layout.table_width], layout.counts[cache_head],
                    &query[size_t(row) * test.head_dim],
                    reinterpret_cast<const Element*>(&output[size_t(row) * test.head_dim]), log_sum_exp[row],
                    arguments.scale, excess);
      }
    }
  }
  for (size_t i = size_t(layout.rows) * test.query_heads * test.head_dim; i < output.size(); ++i) {
    excess.bad += output[i] != kPoison;
  }
  // Merged with itself, a part counts twice.
  arguments.merge = true;
  succeeds(launch());
  const auto merged = operands.output.host();
  const auto merged_log_sum_exp = operands.log_sum_exp.host();
  const auto number_of = [](uint16_t bits) { return static_cast<float>(reinterpret_cast<const Element&>(bits)); };
  for (size_t row = 0; row < size_t(layout.rows) * test.query_heads; ++row) {
    const float own = log_sum_exp[row];
    const double wanted = own + std::log(2.0);
    excess.bad += !(own == -INFINITY ? merged_log_sum_exp[row] == own
                                     : std::abs(merged_log_sum_exp[row] - wanted) <= 1e-6 * (1 + std::abs(wanted)));
    for (size_t i = row * test.head_dim; i < (row + 1) * test.head_dim; ++i) {
      const float before = number_of(output[i]);
      const double allowed = 2 * unit_roundoff(test.dtype) * std::abs(before) + 0x1p-20;
      excess.bad += !(std::abs(number_of(merged[i]) - before) <= allowed);
    }
  }
  char line[100];
  std::snprintf(line, sizeof line, "error %.2f, log-sum-exp %.2f of what is allowed, %d bad", 1 + excess.output,
                1 + excess.log_sum_exp, excess.bad);
  outcome.detail = line;
  outcome.expect(excess.output <= 0 && excess.log_sum_exp <= 0 && excess.bad == 0, "too far from float64");
  return outcome;
}

std::vector<Case> cases() {
  CaseList<Case> list(false);
  const auto add = [&](const std::string& name, const std::vector<Sequence>& sequences, auto change) {
    for (const int bits : {88, 84, 48, 44}) {
      list.add(name + ", bits " + std::to_string(bits), sequences, [=](Case& test) {
        test.key_bits = bits / 10;
        test.value_bits = bits % 10;
        change(test);
      });
    }
  };
  const auto unchanged = [](Case&) {};
  add("small", decode_of({64, 0, 192}), unchanged);
  for (const auto& [name, fault] : std::vector<std::pair<std::string, PagedFault>>{
           {"counts", PagedFault::cache_overflow},
           {"parts of blocks", PagedFault::part_of_block},
           {"blocks", PagedFault::block_out_of_range},
           {"slots", PagedFault::slot_out_of_range},
           {"rows", PagedFault::rows_not_ascending}}) {
    list.add(name + " that lead outside", decode_of({192, 64, 128}),
             [fault = fault](Case& test) { test.outside = fault; });
  }
  if (only_small_cases()) return list.cases;
  const auto lengths = decode_of({64, 128, 640, 4096, 0, 320});
  add("ragged", lengths, unchanged);
  add("ragged, any shape", decode_of({64, 0, 640}), [](Case& test) { test.any_shape = true; });
  for (const int heads : {1, 3, 7, 8, 9, 16}) {
    list.add(std::to_string(heads) + " heads a group", lengths, [=](Case& test) { test.query_heads = 2 * heads; });
  }
  add("one long sequence", decode_of({16000}), unchanged);
  list.add("many short sequences", decode_of(std::vector<int>(200, 128)), unchanged);
  list.add("few queries each", {{3, 128}, {0, 64}, {1, 2048}, {5, 64}, {2, 0}, {4, 704}}, unchanged);
  add("large scores", decode_of({960, 2048}), [](Case& test) { test.shift_scores = true; });
  return list.cases;
}

}  // namespace

TEST("decode-attention-quantized agrees with float64, and reports tables that lead outside") {
  run_cases(cases(), [](const Case& test, Random& random) {
    return with_16_bit_type(test.dtype, [&](auto element) { return attend<decltype(element)>(test, random); });
  });
}

}  // namespace kv::tests

// For torch-hcattn.py. `sizes` are those of attention_for_python, and then the bits of keys and of values. Of the
// pointers, keys and values are quantized. Returns 0, or prints why not.
KV_FOR_PYTHON int kv_decode_quantized(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::QuantizedAttentionArguments arguments;
  static_cast<kv::PagedAttentionArguments&>(arguments) = kv::tests::attention_for_python(sizes, pointers, scale);
  arguments.key_bits = static_cast<int32_t>(sizes[11]);
  arguments.value_bits = static_cast<int32_t>(sizes[12]);
  const kv::FaultSink faults{kv::tests::fault_for_python(), "decode-attention-quantized"};
  return kv::tests::result_for_python(kv::cuda::decode_attention_quantized(
      arguments, pointers[10], pointers[9], faults, static_cast<cudaStream_t>(stream)));
}
