#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <initializer_list>
#include <random>
#include <vector>

#include "kernels/antidiagonal-block-scores/antidiagonal-block-scores.h"
#include "kernels/clustered-block-scores/clustered-block-scores.h"
#include "kernels/pooled-block-scores/pooled-block-scores.h"
#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores.h"
#include "runtime/isa.h"
#include "runtime/workers.h"
#include "tests/check.h"
#include "tests/cuda/cuda-testing.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/for-python.cuda.h"

using namespace kv;
using namespace kv::tests;

namespace {

struct Sizes {
  int rows;
  int tokens;
  int kv_heads;
  int group;
  int dim;
  DType queries;
  DType keys;
  int block_tokens = 64;
};

// Whole prompts, later steps and steps of a few rows; tables of small blocks, rows that pieces of 16 bytes do not fill, and
// more elements than shared memory has room for.
std::vector<Sizes> all_sizes() {
  const auto f16 = DType::f16, bf16 = DType::bf16, f32 = DType::f32;
  std::vector<Sizes> sizes = {{300, 450, 1, 2, 64, f16, f16}, {5, 70, 1, 3, 128, f32, f32}, {1, 1, 1, 1, 20, f16, f16}};
  if (only_small_cases()) return sizes;
  for (const Sizes& more : {Sizes{1300, 1300, 2, 4, 128, f16, f16}, {2300, 5000, 1, 2, 64, f16, f16}, {700, 2011, 3, 1, 48, f32, f32},
                            {640, 3000, 2, 2, 128, bf16, bf16}, {450, 1100, 1, 2, 20, bf16, bf16, 50}, {129, 900, 2, 1, 64, f16, f16, 16},
                            {300, 700, 1, 2, 64, f16, f32}, {300, 700, 1, 1, 512, f32, f32}}) {
    sizes.push_back(more);
  }
  return sizes;
}

const char* name_of(DType dtype) { return dtype == DType::f16 ? "f16" : dtype == DType::bf16 ? "bf16" : "f32"; }

using Estimate = std::function<Status(const PrefillBlockScoresArguments&, ExecutionContext&)>;

struct Named {
  const char* name;
  bool shares;  // whether scores are shares, and not of lines
  Estimate estimate;
};

template <class Arguments>
Arguments of(const PrefillBlockScoresArguments& given) {
  Arguments a;
  static_cast<PrefillBlockScoresArguments&>(a) = given;
  return a;
}

Named antidiagonal(const char* name, int stride) {
  return {name, true, [stride](const PrefillBlockScoresArguments& given, ExecutionContext& context) {
            auto a = of<AntidiagonalBlockScoresArguments>(given);
            a.stride = stride;
            return antidiagonal_block_scores(a, context);
          }};
}

const Named kClustered = {"clustered", true, [](const PrefillBlockScoresArguments& a, ExecutionContext& context) {
                            return clustered_block_scores(of<ClusteredBlockScoresArguments>(a), context);
                          }};
const Named kPooled = {"pooled", true, [](const PrefillBlockScoresArguments& a, ExecutionContext& context) {
                         return pooled_block_scores(of<PooledBlockScoresArguments>(a), context);
                       }};
const Named kAntidiagonal8 = antidiagonal("antidiagonal, stride 8", 8);
const Named kAntidiagonal16 = antidiagonal("antidiagonal, stride 16", 16);
const Named kVerticalSlash = {"vertical-slash", false, [](const PrefillBlockScoresArguments& a, ExecutionContext& context) {
                                return vertical_slash_block_scores(of<VerticalSlashBlockScoresArguments>(a), context);
                              }};
const Named* const kEstimates[] = {&kClustered, &kPooled, &kAntidiagonal8, &kAntidiagonal16, &kVerticalSlash};

std::vector<char> encoded(const std::vector<float>& values, DType dtype) {
  std::vector<char> bytes(values.size() * (dtype == DType::f32 ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::f16) reinterpret_cast<__half*>(bytes.data())[i] = __float2half(values[i]);
    else if (dtype == DType::bf16) reinterpret_cast<__nv_bfloat16*>(bytes.data())[i] = __float2bfloat16(values[i]);
    else reinterpret_cast<float*>(bytes.data())[i] = values[i];
  }
  return bytes;
}

// The last rows of a sequence, in a cache of blocks in reverse order.
struct Sequence {
  Sizes sizes;
  std::vector<float> queries;
  std::vector<float> keys;
  std::vector<int32_t> table;
  std::vector<int32_t> counts;
  std::vector<int32_t> slots = {0};
  std::vector<int32_t> starts;

  explicit Sequence(const Sizes& given) : sizes(given), counts(static_cast<size_t>(given.kv_heads), given.tokens), starts{0, given.rows} {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, size_t count) {
      for (size_t i = 0; i < count; ++i) values.push_back(normal(random) + 0.2f);
    };
    const int blocks = (sizes.tokens + sizes.block_tokens - 1) / sizes.block_tokens;
    fill(queries, static_cast<size_t>(sizes.rows) * static_cast<size_t>(sizes.kv_heads * sizes.group * sizes.dim));
    fill(keys, static_cast<size_t>(blocks * sizes.kv_heads * sizes.block_tokens) * static_cast<size_t>(sizes.dim));
    for (int i = blocks * sizes.kv_heads; i-- > 0;) table.push_back(i);
  }

  void set_query(int row, int head, float value) {
    queries[static_cast<size_t>((row * sizes.kv_heads * sizes.group + head) * sizes.dim)] = value;
  }

  PrefillBlockScoresArguments arguments() const {
    PrefillBlockScoresArguments a;
    a.batch = 1;
    a.kv_heads = sizes.kv_heads;
    a.head_dim = sizes.dim;
    a.query_tokens = sizes.rows;
    a.cache_dtype = sizes.keys;
    a.query_dtype = sizes.queries;
    a.token_stride = sizes.dim;
    a.block_stride = int64_t{sizes.block_tokens} * sizes.dim;
    a.block_tokens = sizes.block_tokens;
    a.block_count = static_cast<int32_t>(table.size());
    a.table_width = static_cast<int32_t>(table.size()) / sizes.kv_heads;
    a.slot_count = 1;
    a.query_heads = sizes.kv_heads * sizes.group;
    a.query_token_stride = int64_t{a.query_heads} * sizes.dim;
    a.query_head_stride = sizes.dim;
    a.scale = 1 / std::sqrt(static_cast<float>(sizes.dim));
    a.tiles = (sizes.rows + 127) / 128;
    a.blocks = (sizes.tokens + 63) / 64;
    return a;
  }

  std::vector<float> room() const {
    const PrefillBlockScoresArguments a = arguments();
    return std::vector<float>(static_cast<size_t>(a.query_heads) * static_cast<size_t>(a.tiles) * static_cast<size_t>(a.blocks), 7);
  }

  std::vector<float> on_cpu(const Estimate& estimate) {
    Workers workers(2);
    ExecutionContext context{workers};
    context.isa = best_isa();
    std::vector<float> scores = room();
    PrefillBlockScoresArguments a = arguments();
    const std::vector<char> stored_queries = encoded(queries, sizes.queries), stored_keys = encoded(keys, sizes.keys);
    a.query = stored_queries.data();
    a.keys = stored_keys.data();
    a.block_table = table.data();
    a.key_counts = counts.data();
    a.slots = slots.data();
    a.query_start = starts.data();
    a.scores = scores.data();
    CHECK(estimate(a, context).ok());
    return scores;
  }

  // `milliseconds` gets the time of a second call.
  std::vector<float> on_gpu(const Estimate& estimate, bool works = true, double* milliseconds = nullptr) const {
    Stream stream(cuda_device());
    DeviceBuffer<float> scores(room());
    DeviceBuffer<char> device_queries(encoded(queries, sizes.queries)), device_keys(encoded(keys, sizes.keys));
    DeviceBuffer<int32_t> device_table(table), device_counts(counts), device_slots(slots), device_starts(starts);
    PrefillBlockScoresArguments a = arguments();
    a.query = device_queries.get();
    a.keys = device_keys.get();
    a.block_table = device_table.get();
    a.key_counts = device_counts.get();
    a.slots = device_slots.get();
    a.query_start = device_starts.get();
    a.scores = scores.get();
    const auto run = [&] {
      stream.enqueue({"blockScores", {}, [a, estimate](ExecutionContext& context) { return estimate(a, context); }});
      const Status status = reached(stream);
      if (works && !status.ok()) std::printf("%s\n", status.message.c_str());
      CHECK(status.ok() == works);
    };
    run();
    if (milliseconds != nullptr) {
      const auto start = std::chrono::steady_clock::now();
      run();
      *milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    }
    return scores.host();
  }
};

// Scores that are both infinite, or both NaN, are alike, and so are those of less than f32's range.
double apart(const std::vector<float>& a, const std::vector<float>& b) {
  double most = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])) || (a[i] < -87 && b[i] < -87)) continue;
    const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= most)) most = std::isnan(difference) ? INFINITY : difference;
  }
  return most;
}

void compare_with_cpu(std::initializer_list<const Named*> estimates) {
  for (const Sizes& sizes : all_sizes()) {
    for (const bool with_nan : {false, true}) {
      Sequence sequence(sizes);
      if (with_nan) sequence.set_query((sizes.rows - 1) / 2 * 2, 0, NAN);
      for (const Named* named : estimates) {
        const double most = apart(sequence.on_gpu(named->estimate), sequence.on_cpu(named->estimate));
        std::printf("     %s, %d rows of %d tokens, heads of %d, %s and %s: %.1e apart\n", named->name, sizes.rows, sizes.tokens,
                    sizes.dim, name_of(sizes.queries), name_of(sizes.keys), most);
        // Elements that are rounded to 11 bits: mean keys, and those of f32 twice. The norms of a query and a key, times
        // the scale, are about the square root of the dims.
        CHECK(most <= 4 * 0x1p-11 * (1 + std::sqrt(static_cast<double>(sizes.dim))));
      }
    }
  }
}

}  // namespace

TEST("clustered-block-scores agree with the CPU") { compare_with_cpu({&kClustered}); }
TEST("pooled-block-scores agree with the CPU") { compare_with_cpu({&kPooled}); }
TEST("antidiagonal-block-scores agree with the CPU") { compare_with_cpu({&kAntidiagonal8, &kAntidiagonal16}); }
TEST("vertical-slash-block-scores agree with the CPU") { compare_with_cpu({&kVerticalSlash}); }

TEST("block-scores of counts of keys that are not theirs are a fault, and nothing is written") {
  Sequence sequence({450, 5000, 1, 2, 64, DType::f16, DType::f16});
  sequence.counts[0] -= 64;
  for (const Named* named : kEstimates) {
    for (const float score : sequence.on_gpu(named->estimate, false)) CHECK(score == 7);
  }
}

TEST("block-scores of each tile add up to one, at 131,072 tokens") {
  if (only_small_cases()) return;
  const Sequence sequence({4096, 131072, 2, 4, 128, DType::f16, DType::f16});
  const int blocks = sequence.arguments().blocks;
  for (const Named* named : kEstimates) {
    double milliseconds = 0;
    const std::vector<float> scores = sequence.on_gpu(named->estimate, true, &milliseconds);
    double most = 0;
    for (size_t first = 0; first < scores.size(); first += static_cast<size_t>(blocks)) {
      double sum = 0;
      for (size_t block = first; block < first + static_cast<size_t>(blocks); ++block) sum += std::exp(static_cast<double>(scores[block]));
      most = std::max(most, named->shares ? std::fabs(sum - 1) : scores[first]);
    }
    std::printf("     %s: %.1e apart, %.2f ms\n", named->name, most, milliseconds);
    // A vertical-slash score is of a line, which is no more than 1.
    CHECK(most <= 1e-3);
  }
}

// sizes: estimate (of kEstimates), rows, tokens, query heads, kv heads, head dim, block tokens, table width, blocks.
// pointers: query, keys, block table, key counts, slots, query start, scores. Tensors are contiguous, in f16.
KV_FOR_PYTHON int kv_block_scores(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  const auto size = [&](int index) { return static_cast<int32_t>(sizes[index]); };
  PrefillBlockScoresArguments a;
  a.batch = a.slot_count = 1;
  a.query_tokens = size(1);
  a.query_heads = size(3);
  a.kv_heads = size(4);
  a.head_dim = size(5);
  a.block_tokens = size(6);
  a.table_width = size(7);
  a.block_count = size(8);
  a.cache_dtype = a.query_dtype = DType::f16;
  a.token_stride = a.query_head_stride = sizes[5];
  a.block_stride = sizes[5] * sizes[6];
  a.query_token_stride = sizes[3] * sizes[5];
  a.scale = scale;
  a.tiles = (size(1) + 127) / 128;
  a.blocks = (size(2) + 63) / 64;
  a.query = pointers[0];
  a.keys = pointers[1];
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.slots = static_cast<const int32_t*>(pointers[4]);
  a.query_start = static_cast<const int32_t*>(pointers[5]);
  a.scores = static_cast<float*>(pointers[6]);
  const auto estimate = [&](const PrefillBlockScoresArguments& given, ExecutionContext& context) {
    return kEstimates[sizes[0]]->estimate(given, context);
  };
  return result_for_python(launch_for_python(estimate, a, stream));
}
