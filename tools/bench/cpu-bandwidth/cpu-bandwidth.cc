// Times every CPU kernel that is bound by reading memory and, in turn with it, a plain read of the same memory. Prints
// one JSON object a line for run.mjs:
//   {"kernel", "shape", "dtype", "threads", "set", "streams", "cache", "requests", "gigahertz", "value": [...], "limit": [...]}
// in bytes a second.
//
//   cpu-bandwidth SAMPLES THREADS [SET [KERNEL]]     SET: the instruction set of the kernels, such as avx2
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "../attention/machine-limits.h"
#include "kernels/block-scores/block-scores.h"
#include "kernels/decode-attention-24/decode-attention-24.h"
#include "kernels/decode-attention/decode-attention.h"
#include "kernels/gather-kv/gather-kv.h"
#include "kernels/linear/linear.h"
#include "kernels/observation-scores/observation-scores.h"
#include "shared/memory-streams/memory-streams.h"

namespace {

using kv::DType;

// At least twice the last-level cache, as a model's layers are: nothing is left there from the pass before.
size_t memory_bytes() {
  constexpr size_t kStep = size_t{256} << 20;
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return cache <= 0 ? kStep : (2 * static_cast<size_t>(cache) + kStep - 1) / kStep * kStep;
}
const size_t kMemoryBytes = memory_bytes();
constexpr int kBlockTokens = 64;

// Halves of magnitude 1/2 to 1 of either sign, in memory that the kernels' own devices would ask for.
class Memory {
 public:
  Memory() : data_(static_cast<char*>(std::aligned_alloc(size_t{2} << 20, kMemoryBytes))) {
    if (data_ == nullptr) std::abort();
    madvise(data_, kMemoryBytes, MADV_HUGEPAGE);
    auto* words = reinterpret_cast<uint16_t*>(data_);
    uint32_t state = 1;
    for (size_t i = 0; i < kMemoryBytes / 2; ++i) {
      state = state * 1664525 + 1013904223;
      words[i] = static_cast<uint16_t>(0x3800 + (state >> 16 & 0x83ff));
    }
  }
  ~Memory() { std::free(data_); }
  char* data() const { return data_; }

 private:
  char* data_;
};

void require(const kv::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message.c_str());
  std::exit(1);
}

// The clock of this core now: dependent additions take one cycle each.
double gigahertz() {
  constexpr long kAdditions = 50'000'000;
  unsigned long sum = 0;
  const double start = bench::seconds_now();
  for (long i = 0; i < kAdditions; ++i) asm volatile("add $1, %0" : "+r"(sum));
  return static_cast<double>(kAdditions) / (bench::seconds_now() - start) / 1e9;
}

class Bench {
 public:
  Bench(int samples, int threads, kv::Isa isa, const char* only)
      : samples_(samples), workers_(threads), context_{workers_, isa}, only_(only) {
    workers_.set_memory_reading(kv::probe_memory_reading(context_.isa));
  }

  char* memory() const { return memory_.data(); }
  kv::ExecutionContext& context() { return context_; }

  // `pass` reads `bytes` of the memory.
  void time(const std::string& kernel, const std::string& shape, const char* dtype, size_t bytes,
            const std::function<void()>& pass) {
    if (only_ != nullptr && kernel != only_) return;
    std::vector<double> values;
    std::vector<double> limits;
    for (int sample = -1; sample < samples_; ++sample) {
      const double start = bench::seconds_now();
      pass();
      const double value = static_cast<double>(bytes) / (bench::seconds_now() - start);
      const double limit = bench::read_bandwidth(workers_, memory(), kMemoryBytes);
      if (sample < 0) continue;
      values.push_back(value);
      limits.push_back(limit);
    }
    std::printf("{\"kernel\": \"%s\", \"shape\": \"%s\", \"dtype\": \"%s\", \"threads\": %d", kernel.c_str(),
                shape.c_str(), dtype, workers_.count());
    const kv::MemoryReading reading = workers_.memory_reading();
    std::printf(", \"set\": \"%s\", \"streams\": %d, \"cache\": %d, \"requests\": %d, \"gigahertz\": %.2f", kv::isa_name(context_.isa),
                reading.streams, reading.cache, reading.requests, gigahertz_);
    print("value", values);
    print("limit", limits);
    std::printf("}\n");
    std::fflush(stdout);
  }

 private:
  static void print(const char* name, const std::vector<double>& numbers) {
    std::printf(", \"%s\": [", name);
    for (size_t i = 0; i < numbers.size(); ++i) std::printf("%s%.4g", i == 0 ? "" : ", ", numbers[i]);
    std::printf("]");
  }

  int samples_;
  kv::Workers workers_;
  kv::ExecutionContext context_;
  const char* only_;
  const double gigahertz_ = gigahertz();
  Memory memory_;
};

const char* name_of(DType dtype) { return dtype == DType::f32 ? "f32" : dtype == DType::f16 ? "f16" : "bf16"; }

void time_linear(Bench& bench, int64_t rows, int64_t in, int64_t out, DType dtype) {
  const size_t layer = static_cast<size_t>(in * out) * byte_size(dtype);
  const size_t layers = kMemoryBytes / layer;
  std::vector<float> input(static_cast<size_t>(rows * in), 0.5f);
  std::vector<float> output(static_cast<size_t>(rows * out));
  kv::LinearArguments a;
  a.input = input.data();
  a.input_stride = in;
  a.output = output.data();
  a.output_stride = out;
  a.weight_stride = in;
  a.weight_dtype = dtype;
  a.tokens = rows;
  a.in_features = in;
  a.out_features = out;
  const std::string shape = std::to_string(in) + " → " + std::to_string(out);
  bench.time("linear of " + std::to_string(rows) + (rows == 1 ? " row" : " rows"), shape, name_of(dtype), layers * layer, [&] {
    for (size_t i = 0; i < layers; ++i) {
      a.weight = bench.memory() + i * layer;
      require(kv::linear({a}, bench.context()));
    }
  });
}

struct Heads {
  int query;
  int kv;
  int dim;
};

// One sequence of `tokens` tokens whose layers lie behind each other in the memory, keys in its first half.
struct Cache {
  int32_t width;
  int64_t layer_bytes;  // of the keys, or of the values
  int64_t layers;
  std::vector<int32_t> table;
  std::vector<int32_t> counts;
  std::vector<float> query;
  std::vector<float> output;
  int32_t slot = 0;
  int32_t starts[2];
  std::string shape;

  Cache(const Heads& heads, int32_t tokens, int64_t block_bytes, int32_t queries = 1)
      : width((tokens + kBlockTokens - 1) / kBlockTokens),
        layer_bytes(int64_t{heads.kv} * width * block_bytes),
        layers(static_cast<int64_t>(kMemoryBytes / 2) / layer_bytes),
        table(static_cast<size_t>(heads.kv * width)),
        counts(static_cast<size_t>(heads.kv), tokens),
        query(static_cast<size_t>(queries) * heads.query * heads.dim),
        output(query.size()),
        starts{0, queries} {
    std::iota(table.begin(), table.end(), 0);
    for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<float>(i % 7) * 0.1f - 0.3f;
    shape = std::to_string(heads.query) + "/" + std::to_string(heads.kv) + " heads of " + std::to_string(heads.dim) +
            ", " + std::to_string(tokens) + " tokens";
  }

  size_t bytes() const { return static_cast<size_t>(2 * layers * layer_bytes); }

  void fill(kv::PagedBatch& a, const Heads& heads) {
    a.batch = 1;
    a.kv_heads = heads.kv;
    a.head_dim = heads.dim;
    a.query_start = starts;
    a.query_tokens = starts[1];
    a.slots = &slot;
    a.slot_count = 1;
    a.block_tokens = kBlockTokens;
    a.token_stride = heads.dim;
    a.block_stride = int64_t{kBlockTokens} * heads.dim;
    a.block_count = heads.kv * width;
    a.block_table = table.data();
    a.table_width = width;
    a.key_counts = counts.data();
  }

  void fill(kv::PagedAttentionArguments& a, const Heads& heads) {
    fill(static_cast<kv::PagedBatch&>(a), heads);
    a.query_heads = heads.query;
    a.query = query.data();
    a.output = output.data();
    a.query_head_stride = a.output_head_stride = heads.dim;
    a.query_token_stride = a.output_token_stride = int64_t{heads.query} * heads.dim;
    a.scale = 0.125f;
  }
};

void time_decode(Bench& bench, const Heads& heads, int32_t tokens, DType dtype) {
  Cache cache(heads, tokens, int64_t{2} * kBlockTokens * heads.dim);
  kv::PagedAttentionArguments a;
  cache.fill(a, heads);
  a.cache_dtype = dtype;
  bench.time("decode-attention", cache.shape, name_of(dtype), cache.bytes(), [&] {
    for (int64_t layer = 0; layer < cache.layers; ++layer) {
      a.keys = bench.memory() + layer * cache.layer_bytes;
      a.values = bench.memory() + kMemoryBytes / 2 + layer * cache.layer_bytes;
      require(kv::decode_attention(a, bench.context()));
    }
  });
}

// All blocks are sparse. Any bits are legal metadata.
void time_decode_24(Bench& bench, const Heads& heads, int32_t tokens, DType dtype) {
  const int64_t non_zero_bytes = 2 * kv::sparse_block_elements(heads.dim);
  const int64_t metadata_bytes = 4 * kv::sparse_block_words(heads.dim);
  Cache cache(heads, tokens, non_zero_bytes + metadata_bytes);
  const int64_t blocks = int64_t{heads.kv} * cache.width;
  for (int32_t i = 0; i < blocks; ++i) cache.table[static_cast<size_t>(i)] = block_entry(kv::BlockKind::sparse_24, i);
  kv::Attention24Arguments a;
  cache.fill(a, heads);
  a.cache_dtype = dtype;
  a.value_table = a.block_table;
  const auto sparse = [&](const char* from) {
    return kv::SparseBlocks24{from, reinterpret_cast<const uint32_t*>(from + blocks * non_zero_bytes),
                              static_cast<int32_t>(blocks)};
  };
  bench.time("decode-attention-24", cache.shape, name_of(dtype), cache.bytes(), [&] {
    for (int64_t layer = 0; layer < cache.layers; ++layer) {
      a.sparse_keys = sparse(bench.memory() + layer * cache.layer_bytes);
      a.sparse_values = sparse(bench.memory() + kMemoryBytes / 2 + layer * cache.layer_bytes);
      a.keys = a.values = bench.memory();
      require(kv::decode_attention_24(a, bench.context()));
    }
  });
}

void time_observation_scores(Bench& bench, const Heads& heads, int32_t tokens, int32_t window) {
  Cache cache(heads, tokens, int64_t{2} * kBlockTokens * heads.dim, window);
  std::vector<float> scores(static_cast<size_t>(heads.kv) * static_cast<size_t>(tokens));
  kv::ObservationScoresArguments a;
  cache.fill(a, heads);
  a.cache_dtype = DType::f16;
  a.query = cache.query.data();
  a.query_heads = heads.query;
  a.query_head_stride = heads.dim;
  a.query_token_stride = int64_t{heads.query} * heads.dim;
  a.scale = 0.125f;
  a.scores = scores.data();
  a.score_tokens = tokens;
  const int64_t layers = std::min<int64_t>(cache.layers, 4);
  bench.time("observation-scores", cache.shape + ", window of " + std::to_string(window), "f16",
             static_cast<size_t>(layers * cache.layer_bytes), [&] {
    for (int64_t layer = 0; layer < layers; ++layer) {
      a.keys = bench.memory() + layer * cache.layer_bytes;
      require(kv::observation_scores(a, bench.context()));
    }
  });
}

void time_block_scores(Bench& bench, const Heads& heads, int32_t tokens, int32_t vectors) {
  Cache cache(heads, tokens, int64_t{2} * vectors * heads.dim);
  std::vector<float> scores(static_cast<size_t>(heads.kv * cache.width));
  kv::BlockScoresArguments a;
  cache.fill(a, heads);
  a.cache_dtype = DType::f16;
  a.block_stride = int64_t{vectors} * heads.dim;
  a.query = cache.query.data();
  a.query_heads = heads.query;
  a.query_head_stride = heads.dim;
  a.query_token_stride = int64_t{heads.query} * heads.dim;
  a.vectors = vectors;
  a.scores = scores.data();
  a.score_head_stride = cache.width;
  a.score_token_stride = int64_t{heads.kv} * cache.width;
  bench.time("block-scores", cache.shape + (vectors == 1 ? ", means" : ", boxes"), "f16", cache.bytes(), [&] {
    for (int64_t layer = 0; layer < 2 * cache.layers; ++layer) {
      a.metadata = bench.memory() + layer * cache.layer_bytes;
      require(kv::block_scores(a, bench.context()));
    }
  });
}

// Keeps every second token. Each byte that is kept is read and written.
void time_gather(Bench& bench, const Heads& heads, int32_t tokens, int32_t run) {
  Cache cache(heads, tokens, int64_t{2} * kBlockTokens * heads.dim);
  const int32_t kept = tokens / 2;
  std::vector<int32_t> indices;
  for (int head = 0; head < heads.kv; ++head) {
    for (int32_t i = 0; i < kept; ++i) indices.push_back(i / run * 2 * run + run + i % run);
  }
  const std::vector<int32_t> counts(static_cast<size_t>(heads.kv), kept);
  kv::GatherKvArguments a;
  a.cache_dtype = DType::f16;
  a.block_stride = int64_t{kBlockTokens} * heads.dim;
  a.token_stride = heads.dim;
  a.block_tokens = kBlockTokens;
  a.block_count = heads.kv * cache.width;
  a.block_table = cache.table.data();
  a.table_width = cache.width;
  a.key_counts = cache.counts.data();
  a.indices = indices.data();
  a.index_stride = kept;
  a.counts = counts.data();
  a.kv_heads = heads.kv;
  a.head_dim = heads.dim;
  bench.time("gather-kv", cache.shape + ", runs of " + std::to_string(run), "f16", cache.bytes(), [&] {
    for (int64_t layer = 0; layer < cache.layers; ++layer) {
      std::fill(cache.counts.begin(), cache.counts.end(), tokens);
      a.key_pool = bench.memory() + layer * cache.layer_bytes;
      a.value_pool = bench.memory() + kMemoryBytes / 2 + layer * cache.layer_bytes;
      require(kv::gather_kv(a, bench.context()));
    }
  });
}

// The named set, or the widest one of this processor.
kv::Isa isa_named(const char* name) {
  for (const kv::Isa isa : {kv::Isa::baseline, kv::Isa::avx2, kv::Isa::avx512, kv::Isa::amx}) {
    if (kv::runs(isa) && std::strcmp(kv::isa_name(isa), name) == 0) return isa;
  }
  std::fprintf(stderr, "this processor does not run %s\n", name);
  std::exit(1);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) {
    std::fprintf(stderr, "usage: cpu-bandwidth SAMPLES THREADS [SET [KERNEL]]\n");
    return 1;
  }
  const kv::Isa isa = count > 3 ? isa_named(arguments[3]) : kv::best_isa();
  Bench bench(std::atoi(arguments[1]), std::atoi(arguments[2]), isa, count > 4 ? arguments[4] : nullptr);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    time_linear(bench, 1, 768, 2048, dtype);
    time_linear(bench, 1, 2048, 2048, dtype);
    time_linear(bench, 1, 2048, 8192, dtype);
    time_linear(bench, 1, 8192, 2048, dtype);
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int64_t rows : {2, 4, 8, 16}) {
      time_linear(bench, rows, 8192 / rows < 2048 ? 8192 / rows : 2048, 2048, dtype);
      time_linear(bench, rows, 8192, 2048, dtype);
    }
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Heads& heads : {Heads{12, 4, 64}, Heads{32, 8, 64}, Heads{32, 8, 128}}) {
      for (const int32_t tokens : {512, 4096, 16384}) {
        time_decode(bench, heads, tokens, dtype);
        time_decode_24(bench, heads, tokens, dtype);
      }
    }
  }
  for (const Heads& heads : {Heads{32, 8, 64}, Heads{32, 8, 128}}) {
    time_observation_scores(bench, heads, 16384, 32);
    time_block_scores(bench, heads, 131072, 1);
    time_block_scores(bench, heads, 131072, 2);
    time_gather(bench, heads, 16384, 1);
    time_gather(bench, heads, 16384, 16);
  }
  return 0;
}
