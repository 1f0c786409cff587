#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
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
#include "tests/cuda/kernels/device.cuda.h"

using namespace kv;
using namespace kv::tests;

namespace {

struct Sizes {
  int rows;
  int tokens;
  int kv_heads;
  int group;
  int dim;
  bool half;  // f16 instead of f32
};

constexpr Sizes kSizes[] = {
    {1300, 1300, 2, 4, 128, true}, {450, 5000, 1, 2, 64, true}, {700, 2011, 3, 1, 48, false}, {5, 70, 1, 3, 256, false},
    {1, 1, 1, 1, 20, true},
};

using Estimate = std::function<Status(const BlockScoresArguments&, ExecutionContext&)>;

struct Named {
  const char* name;
  bool shares;  // whether scores are shares, and not of lines
  Estimate estimate;
};

template <class Arguments>
Arguments of(const BlockScoresArguments& given) {
  Arguments a;
  static_cast<BlockScoresArguments&>(a) = given;
  return a;
}

Named antidiagonal(const char* name, int stride) {
  return {name, true, [stride](const BlockScoresArguments& given, ExecutionContext& context) {
            auto a = of<AntidiagonalBlockScoresArguments>(given);
            a.stride = stride;
            return antidiagonal_block_scores(a, context);
          }};
}

const Named kEstimates[] = {
    {"clustered", true,
     [](const BlockScoresArguments& a, ExecutionContext& context) {
       return clustered_block_scores(of<ClusteredBlockScoresArguments>(a), context);
     }},
    {"pooled", true,
     [](const BlockScoresArguments& a, ExecutionContext& context) {
       return pooled_block_scores(of<PooledBlockScoresArguments>(a), context);
     }},
    antidiagonal("antidiagonal, stride 8", 8),
    antidiagonal("antidiagonal, stride 16", 16),
    {"vertical-slash", false,
     [](const BlockScoresArguments& a, ExecutionContext& context) {
       return vertical_slash_block_scores(of<VerticalSlashBlockScoresArguments>(a), context);
     }},
};

// The last rows of a sequence, in a cache of blocks in reverse order.
struct Sequence {
  Sizes sizes;
  std::vector<float> queries;
  std::vector<float> keys;
  std::vector<__half> half_queries;
  std::vector<__half> half_keys;
  std::vector<int32_t> table;
  std::vector<int32_t> counts;
  std::vector<int32_t> slots = {0};
  std::vector<int32_t> starts;

  explicit Sequence(const Sizes& given) : sizes(given), counts(static_cast<size_t>(given.kv_heads), given.tokens), starts{0, given.rows} {
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::vector<__half>& halves, size_t count, float mean) {
      for (size_t i = 0; i < count; ++i) {
        const float value = normal(random) + mean;
        halves.push_back(__float2half(value));
        values.push_back(value);
      }
    };
    const int blocks = (sizes.tokens + 63) / 64;
    fill(queries, half_queries, static_cast<size_t>(sizes.rows) * static_cast<size_t>(sizes.kv_heads * sizes.group * sizes.dim), 0.2f);
    fill(keys, half_keys, static_cast<size_t>(blocks * sizes.kv_heads) * 64 * static_cast<size_t>(sizes.dim), 0.2f);
    for (int i = blocks * sizes.kv_heads; i-- > 0;) table.push_back(i);
  }

  void set_query(int row, int head, float value) {
    const size_t first = static_cast<size_t>((row * sizes.kv_heads * sizes.group + head) * sizes.dim);
    queries[first] = value;
    half_queries[first] = __float2half(value);
  }

  BlockScoresArguments arguments() const {
    BlockScoresArguments a;
    a.batch = 1;
    a.kv_heads = sizes.kv_heads;
    a.head_dim = sizes.dim;
    a.query_tokens = sizes.rows;
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
    a.tiles = (sizes.rows + 127) / 128;
    a.blocks = (sizes.tokens + 63) / 64;
    return a;
  }

  std::vector<float> room() const {
    const BlockScoresArguments a = arguments();
    return std::vector<float>(static_cast<size_t>(a.query_heads) * static_cast<size_t>(a.tiles) * static_cast<size_t>(a.blocks), 7);
  }

  std::vector<float> on_cpu(const Estimate& estimate) {
    Workers workers(2);
    ExecutionContext context{workers};
    context.isa = best_isa();
    std::vector<float> scores = room();
    BlockScoresArguments a = arguments();
    a.query = sizes.half ? static_cast<const void*>(half_queries.data()) : queries.data();
    a.keys = sizes.half ? static_cast<const void*>(half_keys.data()) : keys.data();
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
    DeviceBuffer<float> device_queries(queries), device_keys(keys), scores(room());
    DeviceBuffer<__half> device_half_queries(half_queries), device_half_keys(half_keys);
    DeviceBuffer<int32_t> device_table(table), device_counts(counts), device_slots(slots), device_starts(starts);
    BlockScoresArguments a = arguments();
    a.query = sizes.half ? static_cast<const void*>(device_half_queries.get()) : device_queries.get();
    a.keys = sizes.half ? static_cast<const void*>(device_half_keys.get()) : device_keys.get();
    a.block_table = device_table.get();
    a.key_counts = device_counts.get();
    a.slots = device_slots.get();
    a.query_start = device_starts.get();
    a.scores = scores.get();
    const auto run = [&] {
      stream.enqueue({"blockScores", {}, [a, estimate](ExecutionContext& context) { return estimate(a, context); }});
      CHECK(reached(stream).ok() == works);
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

}  // namespace

TEST("block scores are estimated on the GPU as on the CPU") {
  for (const Sizes& sizes : kSizes) {
    for (const bool with_nan : {false, true}) {
      Sequence sequence(sizes);
      if (with_nan) sequence.set_query(sizes.rows - 1, 0, NAN);
      for (const Named& named : kEstimates) {
        const double most = apart(sequence.on_gpu(named.estimate), sequence.on_cpu(named.estimate));
        std::printf("     %s, %d rows of %d tokens, heads of %d: %.1e apart\n", named.name, sizes.rows, sizes.tokens, sizes.dim, most);
        // Elements that are rounded to 11 bits: mean keys, and those of f32 twice. The norms of a query and a key, times
        // the scale, are about the square root of the dims.
        CHECK(most <= 4 * 0x1p-11 * (1 + std::sqrt(static_cast<double>(sizes.dim))));
      }
    }
  }
}

TEST("counts of keys that are not those of the scores are a fault, and nothing is written") {
  Sequence sequence(kSizes[1]);
  sequence.counts[0] -= 64;
  for (const Named& named : kEstimates) {
    for (const float score : sequence.on_gpu(named.estimate, false)) CHECK(score == 7);
  }
}

TEST("shares of each tile add up to one, at 131,072 tokens") {
  if (only_small_cases()) return;
  const Sequence sequence({4096, 131072, 2, 4, 128, true});
  const int blocks = sequence.arguments().blocks;
  for (const Named& named : kEstimates) {
    double milliseconds = 0;
    const std::vector<float> scores = sequence.on_gpu(named.estimate, true, &milliseconds);
    double most = 0;
    for (size_t first = 0; first < scores.size(); first += static_cast<size_t>(blocks)) {
      double sum = 0;
      for (size_t block = first; block < first + static_cast<size_t>(blocks); ++block) sum += std::exp(static_cast<double>(scores[block]));
      most = std::max(most, named.shares ? std::fabs(sum - 1) : scores[first]);
    }
    std::printf("     %s: %.1e apart, %.2f ms\n", named.name, most, milliseconds);
    // A vertical-slash score is of a line, which is no more than 1.
    CHECK(most <= 1e-3);
  }
}
