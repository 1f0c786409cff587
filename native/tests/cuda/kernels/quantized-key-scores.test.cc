#include <string>
#include <vector>

#include "kernels/quantized-key-scores/quantized-key-scores.cuda.h"
#include "shared/paged/paged-faults.h"
#include "tests/check.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/quantized-scores-case.h"

namespace kv::tests {
namespace {

struct Case {
  std::string name;
  ScoredSizes sizes;
};

std::vector<Case> all_cases() {
  std::vector<Case> list;
  const auto add = [&](ScoredSizes sizes) {
    const char* type = sizes.dtype == DType::f32 ? "f32" : sizes.dtype == DType::f16 ? "f16" : "bf16";
    list.push_back({std::string(type) + ", heads of " + std::to_string(sizes.head_dim) + ", " + std::to_string(sizes.bits) + " bits, " +
                        (sizes.rotated ? "rotated" : "plain") + ", " + std::to_string(sizes.group) + " query heads",
                    sizes});
  };
  for (const int bits : {8, 4, 3, 2}) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const int head_dim : {64, 128}) {
        if (!only_small_cases()) add({dtype, head_dim, bits, true, 2, 4, 1, 200, 2});
        add({dtype, head_dim, bits, false, 2, 3, 3, 5, 2});
        add({dtype, head_dim, bits, true, 1, 9, 1, 3, 1});
        add({dtype, head_dim, bits, true, 3, 1, 1, 2, 1});
      }
      add({dtype, 80, bits, true, 2, 5, 1, 3, 2});
    }
    add({DType::f16, 96, bits, false, 2, 2, 2, 2, 2});
    add({DType::f32, 7, bits, true, 1, 1, 1, 2, 1});
    add({DType::bf16, 512, bits, true, 1, 2, 1, 2, 1});
  }
  return list;
}

// `test` gets the scores that the kernel wrote.
Status run_on_gpu(QuantizedScoresCase& test) {
  DeviceBuffer<uint8_t> keys(test.keys), queries(test.queries);
  DeviceBuffer<float> scores(test.scores);
  DeviceBuffer<int32_t> table(test.table), counts(test.counts), slots(test.slot_numbers), starts(test.query_start);
  QuantizedKeyScoresArguments a = test.arguments();
  a.keys = keys.get();
  a.query = queries.get();
  a.scores = scores.get();
  a.block_table = table.get();
  a.key_counts = counts.get();
  a.slots = slots.get();
  a.query_start = starts.get();
  Status status = launch_for_python(quantized_key_scores, a, nullptr);
  if (status.ok()) status = cuda_status(cudaDeviceSynchronize());
  if (status.ok()) test.scores = scores.host();
  return status;
}

Outcome compare(const Case& given, Random& random) {
  QuantizedScoresCase test = QuantizedScoresCase::random(random, given.sizes);
  Outcome outcome;
  const Status status = run_on_gpu(test);
  outcome.expect(status.ok(), status.message);
  // Queries are rounded to 2 * 32639 steps.
  const int64_t wrong = test.wrong_scores(cuda::fits_quantized_key_scores(test.arguments()) ? 0.5 / 32639 : 0.0);
  outcome.expect(wrong == 0, std::to_string(wrong) + " scores are wrong");
  outcome.expect(fault_for_python()->code == 0, "a fault was reported");
  return outcome;
}

// What is wrong in the tables is reported, and nothing is read there.
void reports(const char* name, PagedFault fault, void (*spoil)(QuantizedScoresCase&)) {
  Random random(seed());
  for (const DType dtype : {DType::f32, DType::f16}) {
    ScoredSizes sizes;
    sizes.dtype = dtype;
    sizes.blocks = 5;
    QuantizedScoresCase test = QuantizedScoresCase::random(random, sizes);
    spoil(test);
    CHECK(run_on_gpu(test).ok());
    check(fault_for_python()->code == static_cast<int32_t>(fault), name, __FILE__, __LINE__);
    *fault_for_python() = Fault{};
  }
}

}  // namespace

TEST("quantized-key-scores agrees with float64") { run_cases(all_cases(), compare); }

TEST("quantized-key-scores reports tables that lead outside") {
  reports("a block too far", PagedFault::block_out_of_range, [](QuantizedScoresCase& test) { test.table[0] = 1 << 20; });
  reports("a block below zero", PagedFault::block_out_of_range, [](QuantizedScoresCase& test) { test.table[0] = -7; });
  reports("part of a block", PagedFault::part_of_block, [](QuantizedScoresCase& test) { test.counts[0] = 65; });
  reports("too many keys", PagedFault::cache_overflow, [](QuantizedScoresCase& test) { test.counts[1] = 64000; });
  reports("a slot too far", PagedFault::slot_out_of_range, [](QuantizedScoresCase& test) { test.slot_numbers[0] = 2; });
  reports("rows that descend", PagedFault::rows_not_ascending, [](QuantizedScoresCase& test) { test.query_start[1] = 99; });
}

TEST("quantized-key-scores shows a NaN of a query in its own row, and of a key in its own scores") {
  Random random(seed());
  for (const int bits : {8, 4, 3, 2}) {
    ScoredSizes sizes;
    sizes.bits = bits;
    QuantizedScoresCase sound = QuantizedScoresCase::random(random, sizes);
    QuantizedScoresCase spoilt = sound;
    write_element(sizes.dtype, spoilt.queries, 3 * sizes.head_dim + 5, NAN);
    const int block = spoilt.table[static_cast<size_t>(sizes.kv_heads * spoilt.width())];  // the first of the last slot
    spoilt.keys[static_cast<size_t>(block * quantized_block_bytes(sizes.head_dim, bits) + scale_offset(sizes.head_dim, bits)) + 4 * 9] = kNanScale;
    CHECK(run_on_gpu(sound).ok());
    CHECK(run_on_gpu(spoilt).ok());
    int64_t wrong = 0;
    for (size_t i = 0; i < sound.scores.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / sound.score_stride();
      const bool nan = row == 3 || (row < sizes.group && static_cast<int64_t>(i) % sound.score_stride() == 9);
      const bool same = sound.scores[i] == spoilt.scores[i] || (std::isnan(sound.scores[i]) && std::isnan(spoilt.scores[i]));
      wrong += nan ? !std::isnan(spoilt.scores[i]) : !same;
    }
    CHECK(wrong == 0);
  }
}

}  // namespace kv::tests

// For torch-quantized-keys.py, one f16 row of one slot; returns 0, or prints why not. `sizes`: kv heads, head dim, bits,
// rotated, query heads, blocks of a kv head. `pointers`: keys, query, scores, table, counts, slots, query start.
KV_FOR_PYTHON int kv_quantized_key_scores(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::QuantizedKeyScoresArguments a;
  a.batch = a.slot_count = a.query_tokens = 1;
  a.kv_heads = static_cast<int32_t>(sizes[0]);
  a.head_dim = static_cast<int32_t>(sizes[1]);
  a.key_bits = static_cast<int32_t>(sizes[2]);
  a.rotated = sizes[3] != 0;
  a.query_heads = static_cast<int32_t>(sizes[4]);
  a.table_width = static_cast<int32_t>(sizes[5]);
  a.block_count = a.kv_heads * a.table_width;
  a.keys = static_cast<const uint8_t*>(pointers[0]);
  a.query = pointers[1];
  a.query_dtype = kv::DType::f16;
  a.query_head_stride = sizes[1];
  a.query_token_stride = sizes[1] * sizes[4];
  a.scores = static_cast<float*>(pointers[2]);
  a.score_head_stride = int64_t{a.table_width} * kv::kQuantizedBlockTokens;
  a.score_token_stride = a.score_head_stride * a.query_heads;
  a.block_table = static_cast<const int32_t*>(pointers[3]);
  a.key_counts = static_cast<int32_t*>(pointers[4]);
  a.slots = static_cast<const int32_t*>(pointers[5]);
  a.query_start = static_cast<const int32_t*>(pointers[6]);
  a.scale = scale;
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::quantized_key_scores, a, stream));
}
