// Token selection on CUDA against the CPU's, index for index. Observation scores and gathering are here for
// torch-selection.py, which checks them.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/gather-kv/gather-kv.h"
#include "kernels/observation-scores/observation-scores.h"
#include "kernels/select-tokens/select-tokens.h"
#include "runtime/device.h"
#include "shared/scores/small-scores.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/kernel-testing.h"

namespace kv {

Status observation_scores_cuda(const ObservationScoresArguments& arguments, ExecutionContext& context);
Status select_tokens_cuda(const SelectTokensArguments& arguments, ExecutionContext& context);
Status gather_kv_cuda(const GatherKvArguments& arguments, ExecutionContext& context);

namespace baseline {
void select_tokens(const SelectTokensArguments& arguments, Workers& workers);
}

}  // namespace kv

namespace kv::tests {
namespace {

// Any options, and rows of up to `most_tokens` tokens, of which at most `most_kept` are kept.
struct Case {
  std::string name;
  int most_tokens;
  int most_kept;
};

Outcome select(const Case& test, Random& random) {
  constexpr int kRows = 3;
  SelectTokensArguments a;
  a.score_tokens = pick(random, test.most_tokens / 2, test.most_tokens);
  a.row_count = kRows;
  a.index_tokens = std::min(a.score_tokens, test.most_kept) + 32;
  a.round_count = pick(random, 1, 3);
  for (int round = 0; round < a.round_count; ++round) a.rounds[round] = pick_from(random, {1, 1, 2, 4, 8, 40, 300});
  a.overlapping_rounds = pick(random, 0, 3) == 0;
  a.fill = pick(random, 0, 3) != 0;
  a.sink_tokens = pick_from(random, {0, 0, 4});
  a.pooling = static_cast<ScorePooling>(pick_from(random, {0, 0, 1, 2}));
  a.pool_tokens = pick_from(random, {1, 5, 7});
  std::vector<SelectTokensRow> rows;
  for (int row = 0; row < kRows; ++row) {
    const int prefix = pick(random, 0, 1) == 0 ? a.score_tokens : pick(random, 0, a.score_tokens);
    const int capacity = pick(random, 0, std::min(prefix, test.most_kept));
    rows.push_back({prefix, pick_from(random, {0, 16, 32}), capacity, pick_from(random, {1, 1, 3, 16, 100})});
  }
  // Whole numbers, of which sums are exact; few of them make ties.
  const int values = pick_from(random, {3, 50, 1000000});
  std::vector<float> scores(static_cast<size_t>(kRows) * a.score_tokens);
  const float odd = pick_from(random, {NAN, INFINITY, -1.0f, -0.0f});
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
    const int share = pick_from(random, {2, 1});
    const int lowest = pick_from(random, {-150, -2000});
    for (float& score : scores) {
      const bool chosen = score >= 0 && score < INFINITY && pick(random, 1, share) == 1;
      if (chosen) score = score_of(score, pick(random, lowest, -90));
    }
  }

  std::vector<int32_t> indices(static_cast<size_t>(kRows) * a.index_tokens, -7);
  std::vector<int32_t> counts(kRows, -7);
  DeviceBuffer<float> scores_buffer(scores);
  DeviceBuffer<SelectTokensRow> rows_buffer(rows);
  DeviceBuffer<int32_t> indices_buffer(indices), counts_buffer(counts);
  SelectTokensArguments on_device = a;
  on_device.scores = scores_buffer.get();
  on_device.rows = rows_buffer.get();
  on_device.indices = indices_buffer.get();
  on_device.counts = counts_buffer.get();
  succeeds(launch_for_python(select_tokens_cuda, on_device, nullptr));
  succeeds(cudaDeviceSynchronize());

  a.scores = scores.data();
  a.rows = rows.data();
  a.indices = indices.data();
  a.counts = counts.data();
  Workers workers(1);
  baseline::select_tokens(a, workers);
  Outcome outcome;
  outcome.expect(indices_buffer.host() == indices, "other tokens than the CPU");
  outcome.expect(counts_buffer.host() == counts, "other counts than the CPU");
  return outcome;
}

std::vector<Case> cases() {
  struct Group {
    int count;
    int most_tokens;
    int most_kept;
  };
  const std::vector<Group> all{{200, 3000, 3000}, {100, 60000, 60000}, {100, 400000, 2000}};
  const std::vector<Group> small{{6, 600, 600}, {3, 34000, 100}, {1, 34000, 2000}};
  std::vector<Case> list;
  for (const Group& group : only_small_cases() ? small : all) {
    for (int i = 1; i <= group.count; ++i) {
      list.push_back({"up to " + std::to_string(group.most_kept) + " of " + std::to_string(group.most_tokens) +
                          " tokens, " + std::to_string(i),
                      group.most_tokens, group.most_kept});
    }
  }
  return list;
}

int32_t size(const int64_t* sizes, int i) { return static_cast<int32_t>(sizes[i]); }

template <class Arguments>
int result_of(Status (*operation)(const Arguments&, ExecutionContext&), const Arguments& arguments, void* stream) {
  return result_for_python(launch_for_python(operation, arguments, stream));
}

}  // namespace

TEST("select-tokens keeps what the CPU keeps") { run_cases(cases(), select); }

}  // namespace kv::tests

// sizes: batch, query tokens, kv heads, query heads, dim, block tokens, table width, blocks, slots, domain,
// reduction, score tokens, dtype. pointers: query start, slots, block table, key counts, query, keys, scores.
KV_FOR_PYTHON int kv_observation_scores(const int64_t* sizes, void* const* pointers, float scale, void* stream) {
  kv::ObservationScoresArguments a;
  a.batch = kv::tests::size(sizes, 0);
  a.query_tokens = kv::tests::size(sizes, 1);
  a.kv_heads = kv::tests::size(sizes, 2);
  a.query_heads = kv::tests::size(sizes, 3);
  a.head_dim = kv::tests::size(sizes, 4);
  a.block_tokens = kv::tests::size(sizes, 5);
  a.table_width = kv::tests::size(sizes, 6);
  a.block_count = kv::tests::size(sizes, 7);
  a.slot_count = kv::tests::size(sizes, 8);
  a.domain = static_cast<kv::ScoreDomain>(sizes[9]);
  a.reduction = static_cast<kv::GroupReduction>(sizes[10]);
  a.score_tokens = kv::tests::size(sizes, 11);
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
  return kv::tests::result_of(kv::observation_scores_cuda, a, stream);
}

// sizes: rows, score tokens, index tokens, overlapping, fill, sinks, pooling, pool tokens, groups of each round.
// pointers: scores, rows, indices, counts.
KV_FOR_PYTHON int kv_select_tokens(const int64_t* sizes, int rounds, void* const* pointers, void* stream) {
  kv::SelectTokensArguments a;
  a.row_count = kv::tests::size(sizes, 0);
  a.score_tokens = kv::tests::size(sizes, 1);
  a.index_tokens = kv::tests::size(sizes, 2);
  a.overlapping_rounds = sizes[3] != 0;
  a.fill = sizes[4] != 0;
  a.sink_tokens = kv::tests::size(sizes, 5);
  a.pooling = static_cast<kv::ScorePooling>(sizes[6]);
  a.pool_tokens = kv::tests::size(sizes, 7);
  a.round_count = rounds;
  for (int round = 0; round < rounds; ++round) a.rounds[round] = kv::tests::size(sizes, 8 + round);
  a.scores = static_cast<const float*>(pointers[0]);
  a.rows = static_cast<const kv::SelectTokensRow*>(pointers[1]);
  a.indices = static_cast<int32_t*>(pointers[2]);
  a.counts = static_cast<int32_t*>(pointers[3]);
  return kv::tests::result_of(kv::select_tokens_cuda, a, stream);
}

// sizes: kv heads, dim, block tokens, table width, index tokens, dtype. pointers: keys, values, block table, key
// counts, indices, counts.
KV_FOR_PYTHON int kv_gather_kv(const int64_t* sizes, void* const* pointers, void* stream) {
  kv::GatherKvArguments a;
  a.kv_heads = kv::tests::size(sizes, 0);
  a.head_dim = kv::tests::size(sizes, 1);
  a.block_tokens = kv::tests::size(sizes, 2);
  a.table_width = kv::tests::size(sizes, 3);
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
  return kv::tests::result_of(kv::gather_kv_cuda, a, stream);
}

// The code of the first fault that the device reported; 0 without one.
KV_FOR_PYTHON int kv_take_fault() {
  kv::Fault& fault = *kv::tests::fault_for_python();
  const int code = fault.code;
  fault = kv::Fault{};
  return code;
}
