// Times prefill-attention and decode-attention and, between the samples, what the machine can do at most.
// Prints one JSON object a line for run.mjs:
//   {"operation", "heads": [query, kv, dim], "context", "threads", "value": [...], "limit": [...]}
// in floating-point operations a second (prefill) or bytes a second (decode).
//
//   attention-speed SAMPLES
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/decode-attention/decode-attention.h"
#include "kernels/prefill-attention/prefill-attention.h"
#include "machine-limits.h"

namespace {

using kv::DType;

struct Heads {
  int query;
  int kv;
  int dim;
};

constexpr int kBlockTokens = 64;
// Decode reads a cache of many layers, so that none of it is left in the last-level cache from the step
// before.
constexpr int64_t kCacheBytes = int64_t{256} << 20;

// A sequence of `context` tokens in `layers` layers of an f16 or bf16 cache of random bits.
struct Problem {
  Heads heads;
  int32_t context;
  int64_t layer_elements;
  std::vector<uint16_t> keys;
  std::vector<uint16_t> values;
  std::vector<float> query;
  std::vector<float> output;
  std::vector<int32_t> block_table;
  std::vector<int32_t> key_counts;
  int32_t slot = 0;
  int32_t query_start[2] = {0, 0};
  kv::PagedAttentionArguments arguments;

  Problem(Heads heads, int32_t context, int32_t queries, int64_t layers) : heads(heads), context(context) {
    const int32_t width = (context + kBlockTokens - 1) / kBlockTokens;
    layer_elements = int64_t{heads.kv} * width * kBlockTokens * heads.dim;
    std::mt19937 random(1);
    keys.resize(static_cast<size_t>(layers * layer_elements));
    values.resize(keys.size());
    // Halves of magnitude 1/2 to 1, either sign.
    for (uint16_t& bits : keys) bits = static_cast<uint16_t>(0x3800 + (random() & 0x83ff));
    for (uint16_t& bits : values) bits = static_cast<uint16_t>(0x3800 + (random() & 0x83ff));
    query.resize(static_cast<size_t>(queries) * heads.query * heads.dim);
    std::normal_distribution<float> normal;
    for (float& x : query) x = normal(random);
    output.resize(query.size());
    block_table.resize(static_cast<size_t>(heads.kv * width));
    std::iota(block_table.begin(), block_table.end(), 0);
    key_counts.assign(static_cast<size_t>(heads.kv), context);
    query_start[1] = queries;

    kv::PagedAttentionArguments& a = arguments;
    a.batch = 1;
    a.kv_heads = heads.kv;
    a.query_heads = heads.query;
    a.head_dim = heads.dim;
    a.query_start = query_start;
    a.query_tokens = queries;
    a.slots = &slot;
    a.slot_count = 1;
    a.cache_dtype = DType::f16;
    a.block_tokens = kBlockTokens;
    a.token_stride = heads.dim;
    a.block_stride = kBlockTokens * heads.dim;
    a.block_count = heads.kv * width;
    a.block_table = block_table.data();
    a.table_width = width;
    a.key_counts = key_counts.data();
    a.query = query.data();
    a.output = output.data();
    a.query_head_stride = a.output_head_stride = heads.dim;
    a.query_token_stride = a.output_token_stride = heads.query * heads.dim;
    a.scale = 0.125f;
  }

  void use_layer(int64_t layer) {
    arguments.keys = keys.data() + layer * layer_elements;
    arguments.values = values.data() + layer * layer_elements;
  }
};

void require(const kv::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::exit(1);
}

void print(const char* operation, const Problem& problem, int threads, const std::vector<double>& values,
           const std::vector<double>& limits) {
  std::printf("{\"operation\": \"%s\", \"heads\": [%d, %d, %d], \"context\": %d, \"threads\": %d", operation,
              problem.heads.query, problem.heads.kv, problem.heads.dim, problem.context, threads);
  const auto list = [](const char* name, const std::vector<double>& numbers) {
    std::printf(", \"%s\": [", name);
    for (size_t i = 0; i < numbers.size(); ++i) std::printf("%s%.4g", i == 0 ? "" : ", ", numbers[i]);
    std::printf("]");
  };
  list("value", values);
  list("limit", limits);
  std::printf("}\n");
  std::fflush(stdout);
}

void time_prefill(Heads heads, int32_t context, kv::Workers& workers, int samples) {
  Problem problem(heads, context, context, 1);
  problem.use_layer(0);
  kv::ExecutionContext execution{workers, kv::best_isa()};
  const double flops = 4.0 * heads.query * heads.dim * (0.5 * context * (context + 1.0));
  std::vector<double> values;
  std::vector<double> limits;
  for (int sample = -1; sample < samples; ++sample) {
    const double start = bench::seconds_now();
    require(kv::prefill_attention(problem.arguments, execution));
    const double value = flops / (bench::seconds_now() - start);
    const double limit = bench::peak_flops(workers);
    if (sample < 0) continue;
    values.push_back(value);
    limits.push_back(limit);
  }
  print("prefill-attention", problem, workers.count(), values, limits);
}

void time_decode(Heads heads, int32_t context, kv::Workers& workers, int samples) {
  const int64_t layer_bytes = int64_t{4} * heads.kv * context * heads.dim;
  const int64_t layers = (kCacheBytes + layer_bytes - 1) / layer_bytes;
  Problem problem(heads, context, 1, layers);
  kv::ExecutionContext execution{workers, kv::best_isa()};
  std::vector<double> values;
  std::vector<double> limits;
  for (int sample = -1; sample < samples; ++sample) {
    const double start = bench::seconds_now();
    for (int64_t layer = 0; layer < layers; ++layer) {
      problem.use_layer(layer);
      require(kv::decode_attention(problem.arguments, execution));
    }
    const double value = static_cast<double>(layers * layer_bytes) / (bench::seconds_now() - start);
    const double limit =
        bench::read_bandwidth(workers, problem.keys.data(), problem.keys.size() * sizeof(uint16_t));
    if (sample < 0) continue;
    values.push_back(value);
    limits.push_back(limit);
  }
  print("decode-attention", problem, workers.count(), values, limits);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) {
    std::fprintf(stderr, "usage: attention-speed SAMPLES\n");
    return 1;
  }
  const int samples = std::atoi(arguments[1]);
  const Heads shapes[] = {{12, 4, 64}, {8, 2, 64}, {32, 8, 128}};
  for (const int threads : {1, 2}) {
    kv::Workers workers(threads);
    for (const Heads& heads : shapes) {
      for (const int32_t context : {512, 4096, 16384}) {
        // A prompt of 16K tokens with 32 heads of 128 takes half a minute a sample.
        if (heads.query * heads.dim < 4096 || context < 16384) time_prefill(heads, context, workers, samples);
        time_decode(heads, context, workers, samples);
      }
    }
  }
  return 0;
}
