// Checks token selection on CUDA against the CPU's, with nothing but a driver. Built as a shared library, it is what
// torch-selection.py checks and times: observation scores, selection and gathering. README.md says how to build both.
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "attention-reference.h"
#include "kernels/gather-kv/gather-kv.h"
#include "kernels/observation-scores/observation-scores.h"
#include "kernels/select-tokens/select-tokens.h"
#include "runtime/device.h"
#include "runtime/fault.h"
#include "shared/scores/small-scores.h"

namespace kv {

Status observation_scores_cuda(const ObservationScoresArguments& arguments, ExecutionContext& context);
Status select_tokens_cuda(const SelectTokensArguments& arguments, ExecutionContext& context);
Status gather_kv_cuda(const GatherKvArguments& arguments, ExecutionContext& context);

namespace baseline {
void select_tokens(const SelectTokensArguments& arguments, Workers& workers);
}

}  // namespace kv

namespace {

// Working memory that only grows; call an operation once before its launches are captured.
class GrowingQueue : public kv::Queue {
 public:
  void* workspace(size_t bytes) override {
    if (bytes > bytes_) {
      cudaFree(data_);
      bytes_ = cudaMalloc(&data_, bytes) == cudaSuccess ? bytes : 0;
    }
    return bytes_ == 0 ? nullptr : data_;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

kv::Fault* fault() {
  static kv::Fault* const fault = [] {
    kv::Fault* pinned = nullptr;
    cudaHostAlloc(&pinned, sizeof(kv::Fault), cudaHostAllocPortable);
    *pinned = kv::Fault{};
    return pinned;
  }();
  return fault;
}

template <class Arguments>
int run(kv::Status (*operation)(const Arguments&, kv::ExecutionContext&), const Arguments& arguments, void* stream) {
  static GrowingQueue queue;
  static kv::Workers workers(1);
  kv::ExecutionContext context{workers};
  context.device = kv::DeviceKind::cuda;
  context.cuda_stream = stream;
  context.queue = &queue;
  context.faults.fault = fault();
  const kv::Status status = operation(arguments, context);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message.c_str());
  return status.ok() ? 0 : 1;
}

int32_t size(const int64_t* sizes, int i) { return static_cast<int32_t>(sizes[i]); }

}  // namespace

// sizes: batch, query tokens, kv heads, query heads, dim, block tokens, table width, blocks, slots, domain,
// reduction, score tokens, dtype. pointers: query start, slots, block table, key counts, query, keys, scores.
extern "C" int kv_observation_scores(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::ObservationScoresArguments a;
  a.batch = size(sizes, 0);
  a.query_tokens = size(sizes, 1);
  a.kv_heads = size(sizes, 2);
  a.query_heads = size(sizes, 3);
  a.head_dim = size(sizes, 4);
  a.block_tokens = size(sizes, 5);
  a.table_width = size(sizes, 6);
  a.block_count = size(sizes, 7);
  a.slot_count = size(sizes, 8);
  a.domain = static_cast<kv::ScoreDomain>(sizes[9]);
  a.reduction = static_cast<kv::GroupReduction>(sizes[10]);
  a.score_tokens = size(sizes, 11);
  a.query_dtype = a.cache_dtype = static_cast<kv::DType>(sizes[12]);
  a.token_stride = a.head_dim;
  a.block_stride = int64_t{a.block_tokens} * a.head_dim;
  a.query_head_stride = a.head_dim;
  a.query_token_stride = int64_t{a.query_heads} * a.head_dim;
  a.query_start = static_cast<const int32_t*>(pointers[0]);
  a.slots = static_cast<const int32_t*>(pointers[1]);
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.query = pointers[4];
  a.keys = pointers[5];
  a.scores = static_cast<float*>(pointers[6]);
  a.scale = scale;
  return run(kv::observation_scores_cuda, a, stream);
}

// sizes: rows, score tokens, index tokens, overlapping, fill, sinks, pooling, pool tokens, groups of each round.
// pointers: scores, rows, indices, counts.
extern "C" int kv_select_tokens(const int64_t* sizes, int rounds, void* const* pointers, void* stream) {
  kv::SelectTokensArguments a;
  a.row_count = size(sizes, 0);
  a.score_tokens = size(sizes, 1);
  a.index_tokens = size(sizes, 2);
  a.overlapping_rounds = sizes[3] != 0;
  a.fill = sizes[4] != 0;
  a.sink_tokens = size(sizes, 5);
  a.pooling = static_cast<kv::ScorePooling>(sizes[6]);
  a.pool_tokens = size(sizes, 7);
  a.round_count = rounds;
  for (int round = 0; round < rounds; ++round) a.rounds[round] = size(sizes, 8 + round);
  a.scores = static_cast<const float*>(pointers[0]);
  a.rows = static_cast<const kv::SelectTokensRow*>(pointers[1]);
  a.indices = static_cast<int32_t*>(pointers[2]);
  a.counts = static_cast<int32_t*>(pointers[3]);
  return run(kv::select_tokens_cuda, a, stream);
}

// sizes: kv heads, dim, block tokens, table width, index tokens, dtype. pointers: keys, values, block table, key
// counts, indices, counts.
extern "C" int kv_gather_kv(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::GatherKvArguments a;
  a.kv_heads = size(sizes, 0);
  a.head_dim = size(sizes, 1);
  a.block_tokens = size(sizes, 2);
  a.table_width = size(sizes, 3);
  a.index_stride = sizes[4];
  a.cache_dtype = static_cast<kv::DType>(sizes[5]);
  a.token_stride = a.head_dim;
  a.block_stride = int64_t{a.block_tokens} * a.head_dim;
  a.key_pool = pointers[0];
  a.value_pool = pointers[1];
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.indices = static_cast<const int32_t*>(pointers[4]);
  a.counts = static_cast<const int32_t*>(pointers[5]);
  return run(kv::gather_kv_cuda, a, stream);
}

// The code of the first fault that the device reported; 0 without one.
extern "C" int kv_take_fault() {
  const int code = static_cast<int>(fault()->code);
  *fault() = kv::Fault{};
  return code;
}

namespace {

using Random = std::mt19937;

int pick(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

template <size_t kCount>
int one_of(Random& random, const int (&choices)[kCount]) {
  return choices[pick(random, 0, kCount - 1)];
}

// Rows of up to `most_tokens` tokens and any options; of which at most `most_kept` are kept.
bool selects_as_the_cpu(int most_tokens, int most_kept, Random& random) {
  constexpr int kRows = 3;
  kv::SelectTokensArguments a;
  a.score_tokens = pick(random, most_tokens / 2, most_tokens);
  a.row_count = kRows;
  a.index_tokens = std::min(a.score_tokens, most_kept) + 32;
  a.round_count = pick(random, 1, 3);
  for (int round = 0; round < a.round_count; ++round) a.rounds[round] = one_of(random, {1, 1, 2, 4, 8, 40, 300});
  a.overlapping_rounds = pick(random, 0, 3) == 0;
  a.fill = pick(random, 0, 3) != 0;
  a.sink_tokens = one_of(random, {0, 0, 4});
  a.pooling = static_cast<kv::ScorePooling>(one_of(random, {0, 0, 1, 2}));
  a.pool_tokens = one_of(random, {1, 5, 7});
  std::vector<kv::SelectTokensRow> rows;
  for (int row = 0; row < kRows; ++row) {
    const int prefix = pick(random, 0, 1) == 0 ? a.score_tokens : pick(random, 0, a.score_tokens);
    const int capacity = pick(random, 0, std::min(prefix, most_kept));
    rows.push_back({prefix, one_of(random, {0, 16, 32}), capacity, one_of(random, {1, 1, 3, 16, 100})});
  }
  // Whole numbers, of which sums are exact; few of them make ties.
  const int values = one_of(random, {3, 50, 1000000});
  std::vector<float> scores(static_cast<size_t>(kRows) * a.score_tokens);
  const float odd = std::vector<float>{NAN, INFINITY, -1.0f, -0.0f}[pick(random, 0, 3)];
  for (float& score : scores) score = pick(random, 0, 99) == 0 ? odd : static_cast<float>(pick(random, 0, values));
  if (pick(random, 0, 2) == 0) {
    // The best in stretches that one block of eight looks at.
    const int block = pick(random, 0, 7);
    for (size_t i = 0; i < scores.size(); ++i) {
      if (i % a.score_tokens / 512 % 8 == static_cast<size_t>(block)) scores[i] += static_cast<float>(values);
    }
  }
  if (pick(random, 0, 3) == 0) {
    // Too small for f32, some or all of them.
    const int share = one_of(random, {2, 1});
    const int lowest = one_of(random, {-150, -2000});
    for (float& score : scores) {
      if (score >= 0 && score < INFINITY && pick(random, 1, share) == 1) score = kv::score_of(score, pick(random, lowest, -90));
    }
  }

  std::vector<int32_t> indices(static_cast<size_t>(kRows) * a.index_tokens, -7);
  std::vector<int32_t> counts(kRows, -7);
  DeviceBuffer<float> scores_buffer(scores);
  DeviceBuffer<kv::SelectTokensRow> rows_buffer(rows);
  DeviceBuffer<int32_t> indices_buffer(indices), counts_buffer(counts);
  kv::SelectTokensArguments on_device = a;
  on_device.scores = scores_buffer.get();
  on_device.rows = rows_buffer.get();
  on_device.indices = indices_buffer.get();
  on_device.counts = counts_buffer.get();
  if (run(kv::select_tokens_cuda, on_device, nullptr) != 0) return false;
  check(cudaDeviceSynchronize(), "select-tokens");

  a.scores = scores.data();
  a.rows = rows.data();
  a.indices = indices.data();
  a.counts = counts.data();
  kv::Workers workers(1);
  kv::baseline::select_tokens(a, workers);
  return indices_buffer.host() == indices && counts_buffer.host() == counts;
}

}  // namespace

// usage: selection-bench [small] [seed]
int main(int argc, char** argv) {
  struct Cases {
    int count;
    int most_tokens;
    int most_kept;
  };
  const bool small_only = argc > 1 && std::string(argv[1]) == "small";
  const unsigned seed = argc > 2 ? std::atoi(argv[2]) : std::random_device{}();
  Random random(seed);
  const std::vector<Cases> all = {{200, 3000, 3000}, {100, 60000, 60000}, {100, 400000, 2000}};
  const std::vector<Cases> small = {{6, 600, 600}, {3, 34000, 100}, {1, 34000, 2000}};
  int failed = 0;
  int count = 0;
  for (const Cases& cases : small_only ? small : all) {
    for (int i = 0; i < cases.count; ++i, ++count) {
      failed += !selects_as_the_cpu(cases.most_tokens, cases.most_kept, random);
    }
  }
  std::printf("tests: %d passed, %d failed, 0 skipped (seed %u)\n", count - failed, failed, seed);
  return failed == 0 ? 0 : 1;
}
