#include "kernels/decompose-attention/decompose-attention.h"

#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "runtime/isa.h"
#include "runtime/workers.h"
#include "tests/cuda/cuda-testing.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"

using namespace kv;
using namespace kv::tests;

namespace {

struct Sizes {
  int kv_heads;
  int group;
  int dim;
  int pairs;
  bool half;  // f16 instead of f32
  bool interleaved;
};

// A sequence in a cache of blocks in reverse order, and the parts that a device finds.
struct CachedSequence {
  Sizes sizes;
  int tokens;
  std::vector<float> queries;
  std::vector<float> keys;
  std::vector<__half> half_queries;
  std::vector<__half> half_keys;
  std::vector<int32_t> table;
  std::vector<int32_t> counts;
  std::vector<int32_t> slots = {0};
  std::vector<float> frequencies;

  CachedSequence(const Sizes& given, int length, unsigned seed) : sizes(given), tokens(length) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int blocks = (tokens + 63) / 64;
    const auto fill = [&](std::vector<float>& values, std::vector<__half>& halves, size_t count, float mean) {
      for (size_t i = 0; i < count; ++i) {
        halves.push_back(__float2half(normal(random) + mean));
        values.push_back(sizes.half ? __half2float(halves.back()) : normal(random) + mean);
      }
    };
    fill(queries, half_queries, static_cast<size_t>(tokens) * sizes.kv_heads * sizes.group * sizes.dim, 0.1f);
    fill(keys, half_keys, static_cast<size_t>(blocks) * sizes.kv_heads * 64 * sizes.dim, 0.3f);
    for (int i = blocks * sizes.kv_heads; i-- > 0;) table.push_back(i);
    for (int pair = 0; pair < sizes.pairs; ++pair) {
      frequencies.push_back(static_cast<float>(std::pow(1e4, -static_cast<double>(pair) / sizes.pairs)));
    }
  }

  DecomposeAttentionArguments arguments(int first_row, int end) {
    DecomposeAttentionArguments a;
    a.batch = 1;
    a.kv_heads = sizes.kv_heads;
    a.head_dim = sizes.dim;
    a.query_tokens = end - first_row;
    a.cache_dtype = a.query_dtype = sizes.half ? DType::f16 : DType::f32;
    a.token_stride = sizes.dim;
    a.block_stride = int64_t{64} * sizes.dim;
    a.block_tokens = 64;
    a.block_count = static_cast<int32_t>(table.size());
    a.table_width = static_cast<int32_t>(table.size()) / sizes.kv_heads;
    a.slot_count = 1;
    a.query_heads = sizes.kv_heads * sizes.group;
    a.query_token_stride = int64_t{a.query_heads} * sizes.dim;
    a.query_head_stride = sizes.dim;
    a.scale = 1 / std::sqrt(static_cast<float>(sizes.dim));
    a.pairs = sizes.pairs;
    a.convention = sizes.interleaved ? RopeConvention::interleaved : RopeConvention::half_split;
    a.attention_scale = 1.1f;
    a.state_values = DecompositionState(a).values();
    a.seen_tokens = first_row;
    a.sink_tokens = 4;
    a.diagonal_tokens = 100;
    a.samples = 20 * sizes.dim;
    a.seed = 3;
    a.ridge = 1e-4;
    a.tokens = end;
    a.rows = end - first_row;
    return a;
  }
};

struct Parts {
  std::vector<float> slash;
  std::vector<float> vertical;
  std::vector<float> horizontal;
};

Parts room_for(const DecomposeAttentionArguments& a) {
  const auto of = [&](int count) { return std::vector<float>(static_cast<size_t>(a.query_heads) * static_cast<size_t>(count)); };
  return {of(a.tokens), of(a.tokens), of(a.rows)};
}

Parts on_cpu(CachedSequence& sequence, const std::vector<int>& steps, DecompositionFormulas formulas) {
  Workers workers(4);
  ExecutionContext context{workers};
  context.isa = best_isa();
  std::vector<double> state;
  Parts parts;
  int first = 0;
  for (const int end : steps) {
    DecomposeAttentionArguments a = sequence.arguments(first, end);
    a.formulas = formulas;
    state.resize(static_cast<size_t>(a.state_values));
    parts = room_for(a);
    std::vector<int32_t> counts(static_cast<size_t>(a.kv_heads), end);
    std::vector<int32_t> starts = {0, a.rows};
    const size_t skipped = static_cast<size_t>(first) * static_cast<size_t>(a.query_token_stride);
    a.query = sequence.sizes.half ? static_cast<const void*>(sequence.half_queries.data() + skipped) : sequence.queries.data() + skipped;
    a.keys = sequence.sizes.half ? static_cast<const void*>(sequence.half_keys.data()) : sequence.keys.data();
    a.block_table = sequence.table.data();
    a.key_counts = counts.data();
    a.slots = sequence.slots.data();
    a.query_start = starts.data();
    a.inverse_frequencies = sequence.frequencies.data();
    a.state = state.data();
    a.slash = parts.slash.data();
    a.vertical = parts.vertical.data();
    a.horizontal = parts.horizontal.data();
    CHECK(decompose_attention(a, context).ok());
    first = end;
  }
  return parts;
}

Parts on_gpu(CachedSequence& sequence, const std::vector<int>& steps, DecompositionFormulas formulas, int counted_more = 0) {
  const std::shared_ptr<Device> device = cuda_device();
  Stream stream(device);
  DeviceBuffer<float> queries(sequence.queries);
  DeviceBuffer<float> keys(sequence.keys);
  DeviceBuffer<__half> half_queries(sequence.half_queries);
  DeviceBuffer<__half> half_keys(sequence.half_keys);
  DeviceBuffer<int32_t> table(sequence.table);
  DeviceBuffer<int32_t> slots(sequence.slots);
  DeviceBuffer<float> frequencies(sequence.frequencies);
  // What is in an empty state counts for nothing.
  DeviceBuffer<double> state(std::vector<double>(static_cast<size_t>(sequence.arguments(0, 1).state_values), std::nan("")));
  Parts parts;
  int first = 0;
  for (const int end : steps) {
    DecomposeAttentionArguments a = sequence.arguments(first, end);
    a.formulas = formulas;
    const Parts room = room_for(a);
    DeviceBuffer<float> slash(room.slash);
    DeviceBuffer<float> vertical(room.vertical);
    DeviceBuffer<float> horizontal(room.horizontal);
    DeviceBuffer<int32_t> counts(std::vector<int32_t>(static_cast<size_t>(a.kv_heads), end + counted_more));
    DeviceBuffer<int32_t> starts(std::vector<int32_t>{0, a.rows});
    const size_t skipped = static_cast<size_t>(first) * static_cast<size_t>(a.query_token_stride);
    a.query = sequence.sizes.half ? static_cast<const void*>(half_queries.get() + skipped) : queries.get() + skipped;
    a.keys = sequence.sizes.half ? static_cast<const void*>(half_keys.get()) : keys.get();
    a.block_table = table.get();
    a.key_counts = counts.get();
    a.slots = slots.get();
    a.query_start = starts.get();
    a.inverse_frequencies = frequencies.get();
    a.state = state.get();
    a.slash = slash.get();
    a.vertical = vertical.get();
    a.horizontal = horizontal.get();
    stream.enqueue({"decomposeAttention", {}, [a](ExecutionContext& context) { return decompose_attention(a, context); }});
    const Status status = reached(stream);
    CHECK(status.ok() == (counted_more == 0));
    parts = {slash.host(), vertical.host(), horizontal.host()};
    first = end;
  }
  return parts;
}

double apart(const std::vector<float>& a, const std::vector<float>& b) {
  double most = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= most) && !(std::isnan(a[i]) && std::isnan(b[i]))) most = std::isnan(difference) ? INFINITY : difference;
  }
  return most;
}

constexpr Sizes kSizes[] = {
    {2, 4, 128, 64, true, false}, {1, 1, 64, 32, true, true}, {3, 2, 48, 12, false, false}, {1, 3, 256, 128, false, true},
};

}  // namespace

TEST("attention is decomposed on the GPU as on the CPU, in one step and in several") {
  for (const Sizes& sizes : kSizes) {
    CachedSequence sequence(sizes, 1300, 7);
    for (const auto formulas : {DecompositionFormulas::corrected, DecompositionFormulas::paper}) {
      for (const std::vector<int>& steps : {std::vector<int>{1300}, {300, 812, 1300}, {90}, {110}}) {
        const Parts wanted = on_cpu(sequence, steps, formulas);
        const Parts given = on_gpu(sequence, steps, formulas);
        const double slash = apart(given.slash, wanted.slash);
        const double vertical = apart(given.vertical, wanted.vertical);
        const double horizontal = apart(given.horizontal, wanted.horizontal);
        std::printf("     heads of %d, %zu steps to %d: s %.1e, v %.1e, h %.1e apart\n", sizes.dim, steps.size(), steps.back(),
                    slash, vertical, horizontal);
        CHECK(slash < 2e-3 && vertical < 2e-3 && horizontal < 2e-3);
      }
    }
  }
}

TEST("counts of keys that are not the tensors' are a fault, and nothing is written") {
  CachedSequence sequence(kSizes[1], 300, 5);
  const Parts parts = on_gpu(sequence, {300}, DecompositionFormulas::corrected, -1);
  for (const float value : parts.slash) CHECK(value == 0);
}
