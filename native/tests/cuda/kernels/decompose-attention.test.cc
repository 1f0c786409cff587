#include "kernels/decompose-attention/decompose-attention.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/select-key-blocks/select-key-blocks.h"
#include "runtime/isa.h"
#include "runtime/workers.h"
#include "tests/cuda/cuda-testing.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"

using namespace kv;
using namespace kv::tests;

namespace {

struct Sizes {
  int kv_heads;
  int group;
  int dim;
  int pairs;
  DType dtype;
  bool interleaved;
};

size_t bytes_of(DType dtype) { return dtype == DType::f32 ? sizeof(float) : sizeof(__half); }

void store(float value, DType dtype, char* to) {
  const __half half = __float2half(value);
  const __nv_bfloat16 brain = __float2bfloat16(value);
  std::memcpy(to, dtype == DType::f32 ? static_cast<const void*>(&value) : dtype == DType::f16 ? &half : static_cast<const void*>(&brain),
              bytes_of(dtype));
}

// A sequence in a cache of blocks in reverse order, and the parts that a device finds.
struct CachedSequence {
  Sizes sizes;
  int tokens;
  std::vector<char> queries;
  std::vector<char> keys;
  std::vector<int32_t> table;
  std::vector<int32_t> counts;
  std::vector<int32_t> slots = {0};
  std::vector<float> frequencies;
  float scale;
  int sinks = 4;
  int diagonal = 100;

  CachedSequence(const Sizes& given, int length, unsigned seed)
      : sizes(given), tokens(length), scale(1 / std::sqrt(static_cast<float>(given.dim))) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int blocks = (tokens + 63) / 64;
    const auto filled = [&](size_t count, float mean) {
      std::vector<char> values(count * bytes_of(sizes.dtype));
      for (size_t i = 0; i < count; ++i) store(normal(random) + mean, sizes.dtype, values.data() + i * bytes_of(sizes.dtype));
      return values;
    };
    queries = filled(static_cast<size_t>(tokens) * sizes.kv_heads * sizes.group * sizes.dim, 0.1f);
    keys = filled(static_cast<size_t>(blocks) * sizes.kv_heads * 64 * sizes.dim, 0.3f);
    for (int i = blocks * sizes.kv_heads; i-- > 0;) table.push_back(i);
    for (int pair = 0; pair < sizes.pairs; ++pair) {
      frequencies.push_back(static_cast<float>(std::pow(1e4, -static_cast<double>(pair) / sizes.pairs)));
    }
  }

  size_t bytes_before(int row) const {
    return static_cast<size_t>(row) * sizes.kv_heads * sizes.group * sizes.dim * bytes_of(sizes.dtype);
  }

  DecomposeAttentionArguments arguments(int first_row, int end) {
    DecomposeAttentionArguments a;
    a.batch = 1;
    a.kv_heads = sizes.kv_heads;
    a.head_dim = sizes.dim;
    a.query_tokens = end - first_row;
    a.cache_dtype = a.query_dtype = sizes.dtype;
    a.token_stride = sizes.dim;
    a.block_stride = int64_t{64} * sizes.dim;
    a.block_tokens = 64;
    a.block_count = static_cast<int32_t>(table.size());
    a.table_width = static_cast<int32_t>(table.size()) / sizes.kv_heads;
    a.slot_count = 1;
    a.query_heads = sizes.kv_heads * sizes.group;
    a.query_token_stride = int64_t{a.query_heads} * sizes.dim;
    a.query_head_stride = sizes.dim;
    a.scale = scale;
    a.pairs = sizes.pairs;
    a.convention = sizes.interleaved ? RopeConvention::interleaved : RopeConvention::half_split;
    a.attention_scale = 1.1f;
    a.state_values = DecompositionState(a).values();
    a.seen_tokens = first_row;
    a.sink_tokens = sinks;
    a.diagonal_tokens = diagonal;
    a.samples = (only_small_cases() ? 5 : 20) * sizes.dim;
    a.seed = 3;
    a.ridge = end > 2000 ? 1e-6 : 1e-4;  // few tokens leave least squares that hang on roundings
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
    a.query = sequence.queries.data() + sequence.bytes_before(first);
    a.keys = sequence.keys.data();
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
  DeviceBuffer<char> queries(sequence.queries);
  DeviceBuffer<char> keys(sequence.keys);
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
    a.query = queries.get() + sequence.bytes_before(first);
    a.keys = keys.get();
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
    if (!status.ok() && counted_more == 0) std::printf("     %s\n", status.message.c_str());
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

void check_against_cpu(CachedSequence& sequence, const std::vector<int>& steps, DecompositionFormulas formulas) {
  const Parts wanted = on_cpu(sequence, steps, formulas);
  const Parts given = on_gpu(sequence, steps, formulas);
  const double slash = apart(given.slash, wanted.slash);
  const double vertical = apart(given.vertical, wanted.vertical);
  const double horizontal = apart(given.horizontal, wanted.horizontal);
  std::printf("     heads of %d, %zu steps to %d: s %.1e, v %.1e, h %.1e apart\n", sequence.sizes.dim, steps.size(), steps.back(), slash,
              vertical, horizontal);
  CHECK(slash < 2e-3 && vertical < 2e-3 && horizontal < 2e-3);
}

const Sizes kSizes[] = {
    {2, 4, 128, 64, DType::f16, false}, {1, 3, 128, 64, DType::bf16, false}, {1, 1, 64, 32, DType::f16, true},
    {2, 2, 64, 24, DType::bf16, false}, {3, 2, 48, 12, DType::f32, false},   {1, 3, 256, 128, DType::f32, true},
};

}  // namespace

TEST("decompose-attention agrees with the CPU, in one step and in several") {
  for (const Sizes& sizes : kSizes) {
    CachedSequence sequence(sizes, 9000, 7);
    for (const auto formulas : {DecompositionFormulas::corrected, DecompositionFormulas::paper}) {
      if (only_small_cases() && formulas == DecompositionFormulas::paper && sizes.dim != 48) continue;
      for (const std::vector<int>& steps : {std::vector<int>{110}, {200, 500}, {90}, {1300}, {300, 812, 1300}, {4000, 9000}}) {
        if (only_small_cases() && steps.back() > 1000) continue;
        check_against_cpu(sequence, steps, formulas);
      }
    }
  }
}

TEST("decompose-attention of more rows than there are covariances at a time agrees with the CPU") {
  if (only_small_cases()) return;
  CachedSequence sequence({2, 2, 64, 32, DType::f16, false}, 34'000, 11);
  check_against_cpu(sequence, {34'000}, DecompositionFormulas::corrected);
}

TEST("decompose-attention of a negative scale, many sinks and a wide diagonal agrees with the CPU") {
  CachedSequence sequence({1, 3, 128, 64, DType::f16, false}, 900, 13);
  sequence.scale = -0.1f;
  sequence.sinks = 20;
  sequence.diagonal = 170;
  check_against_cpu(sequence, {120, 300, 900}, DecompositionFormulas::corrected);
}

TEST("decompose-attention of 8 and 9 query heads a kv head, and of columns that fill no tile, agrees with the CPU") {
  for (const Sizes& sizes : {Sizes{1, 8, 64, 22, DType::f16, false}, Sizes{2, 9, 128, 64, DType::bf16, true}}) {
    CachedSequence sequence(sizes, 400, 17);
    check_against_cpu(sequence, {150, 400}, DecompositionFormulas::corrected);
  }
}

TEST("decompose-attention of keys that are all the same knows nothing, as on the CPU") {
  for (const Sizes& sizes : kSizes) {
    CachedSequence sequence(sizes, 300, 5);
    for (size_t i = 0; i < sequence.keys.size(); i += bytes_of(sizes.dtype)) store(0.7f, sizes.dtype, sequence.keys.data() + i);
    sequence.frequencies.assign(sequence.frequencies.size(), 0);
    for (const auto formulas : {DecompositionFormulas::corrected, DecompositionFormulas::paper}) {
      for (const Parts& parts : {on_cpu(sequence, {150, 300}, formulas), on_gpu(sequence, {150, 300}, formulas)}) {
        for (const std::vector<float>& part : {parts.slash, parts.vertical}) {
          for (const float value : part) CHECK(std::isnan(value));
        }
      }
    }
  }
}

TEST("decompose-attention of counts that are not the tensors' is a fault, and nothing is written") {
  CachedSequence sequence(kSizes[2], 300, 5);
  const Parts parts = on_gpu(sequence, {300}, DecompositionFormulas::corrected, -1);
  for (const float value : parts.slash) CHECK(value == 0);
}

// sizes: rows, tokens, seen tokens, query heads, kv heads, head dim, block tokens, table width, blocks, pairs, samples,
// sinks, diagonal. pointers: query, keys, block table, key counts, slots, query start, inverse frequencies, state,
// slash, vertical, horizontal. Tensors are contiguous, in f16.
KV_FOR_PYTHON int kv_decompose_attention(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::DecomposeAttentionArguments a;
  const auto size = [&](int index) { return static_cast<int32_t>(sizes[index]); };
  a.batch = a.slot_count = 1;
  a.rows = a.query_tokens = size(0);
  a.tokens = size(1);
  a.seen_tokens = size(2);
  a.query_heads = size(3);
  a.kv_heads = size(4);
  a.head_dim = size(5);
  a.block_tokens = size(6);
  a.table_width = size(7);
  a.block_count = size(8);
  a.pairs = size(9);
  a.samples = size(10);
  a.sink_tokens = size(11);
  a.diagonal_tokens = size(12);
  a.cache_dtype = a.query_dtype = kv::DType::f16;
  a.token_stride = a.query_head_stride = sizes[5];
  a.block_stride = sizes[5] * sizes[6];
  a.query_token_stride = sizes[3] * sizes[5];
  a.scale = scale;
  a.ridge = 1e-6;
  a.query = pointers[0];
  a.keys = pointers[1];
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.slots = static_cast<const int32_t*>(pointers[4]);
  a.query_start = static_cast<const int32_t*>(pointers[5]);
  a.inverse_frequencies = static_cast<const float*>(pointers[6]);
  a.state = static_cast<double*>(pointers[7]);
  a.state_values = kv::DecompositionState(a).values();
  a.slash = static_cast<float*>(pointers[8]);
  a.vertical = static_cast<float*>(pointers[9]);
  a.horizontal = static_cast<float*>(pointers[10]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::decompose_attention, a, stream));
}

// sizes: rows, tokens, query heads, sinks, diagonal, capacity. pointers: slash, vertical, horizontal, key blocks,
// counts.
KV_FOR_PYTHON int kv_select_key_blocks(const int64_t* sizes, void* const* pointers, double budget, void* stream) {
  kv::SelectKeyBlocksArguments a;
  const auto size = [&](int index) { return static_cast<int32_t>(sizes[index]); };
  a.rows = size(0);
  a.tokens = size(1);
  a.query_heads = size(2);
  a.sink_tokens = size(3);
  a.diagonal_tokens = size(4);
  a.capacity = size(5);
  a.tile_rows = 128;
  a.rule = kv::BlockRule::budget;
  a.share = budget;
  a.slash = static_cast<const float*>(pointers[0]);
  a.vertical = static_cast<const float*>(pointers[1]);
  a.horizontal = static_cast<const float*>(pointers[2]);
  a.key_blocks = static_cast<int32_t*>(pointers[3]);
  a.counts = static_cast<int32_t*>(pointers[4]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::select_key_blocks, a, stream));
}
