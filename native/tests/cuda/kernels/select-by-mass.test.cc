// Choice of tokens by their share on CUDA against the CPU's, bit for bit; and sums of values on the host, for
// torch-hcattn.py.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/decode-attention-listed/decode-attention-listed.h"
#include "kernels/select-by-mass/select-by-mass.h"
#include "kernels/weighted-values/weighted-values.h"
#include "runtime/device.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/kernel-testing.h"

namespace kv::baseline {
void select_by_mass(const SelectByMassArguments& arguments, Workers& workers);
}

namespace kv::tests {
namespace {

struct Case {
  std::string name;
  int most_tokens;
  int most_rows;
  bool has_room;  // for all tokens
  bool flat;      // more tokens than are listed lie in the bin of the last one
};

// Scores of one row: of some spread, with ties, and with odd ones.
void draw_scores(std::vector<float>& scores, Random& random, bool flat) {
  const bool huge = pick(random, 0, 9) == 0;
  const float spread = flat ? pick_from(random, {0.0f, 1e-6f, 0.001f, 0.1f}) : pick_from(random, {0.0f, 0.001f, 1.0f, 4.0f, 30.0f});
  const int levels = pick_from(random, {0, 0, 4, 400});
  const float odd = pick_from(random, {0.0f, 0.0f, -0.0f, -INFINITY, 12.0f, INFINITY, NAN});
  const int odd_share = pick_from(random, {2, 1000, 100000});
  std::normal_distribution<float> normal(huge ? 300.0f : 0.0f, 1.0f);
  for (float& score : scores) {
    score = spread * normal(random);
    if (levels > 0) score = std::round(score * static_cast<float>(levels)) / static_cast<float>(levels);
    if (odd != 0 && pick(random, 1, odd_share) == 1) score = odd;
  }
}

// Between which scores the parts of each row and head are, of parts of all sizes.
std::vector<float> ranges_of(const SelectByMassArguments& a, const std::vector<float>& scores, const std::vector<int32_t>& starts,
                             const std::vector<int32_t>& slots, const std::vector<int32_t>& counts) {
  std::vector<float> ranges(static_cast<size_t>(a.query_tokens) * a.query_heads * a.range_parts * 2, NAN);
  for (int entry = 0; entry < a.batch; ++entry) {
    for (int row_head = starts[entry] * a.query_heads; row_head < starts[entry + 1] * a.query_heads; ++row_head) {
      float* const own = &ranges[static_cast<size_t>(row_head) * a.range_parts * 2];
      for (int part = 0; part < a.range_parts; ++part) {
        own[2 * part] = INFINITY;
        own[2 * part + 1] = -INFINITY;
      }
      for (int token = 0; token < counts[slots[entry] * a.kv_heads + row_head % a.query_heads / a.group()]; ++token) {
        const float score = scores[static_cast<size_t>(row_head) * a.score_tokens + token];
        float* const part = own + 2 * (token / 3 % a.range_parts);
        part[0] = std::min(part[0], score);
        part[1] = std::isnan(score) || std::isnan(part[1]) ? NAN : std::max(part[1], score);
      }
    }
  }
  return ranges;
}

Outcome choose(const Case& test, Random& random) {
  const int kv_heads = pick(random, 1, 3);
  const int group = pick_from(random, {1, 2, 4, 4, 5, 8});
  const int batch = pick(random, 1, test.most_rows);
  SelectByMassArguments a;
  a.batch = batch;
  a.kv_heads = kv_heads;
  a.query_heads = kv_heads * group;
  a.slot_count = batch + 1;
  a.score_tokens = pick(random, std::max(1, test.most_tokens / 2), test.most_tokens);
  a.table_width = (a.score_tokens + kValueBlockTokens - 1) / kValueBlockTokens;
  a.tau = pick_from(random, {0.5, 0.9, 0.9, 0.99, 0.999999, 1.0});
  a.missing = static_cast<MissingMass>(pick(random, 0, 2));
  std::vector<int32_t> starts{0};
  for (int entry = 0; entry < batch; ++entry) starts.push_back(starts.back() + pick_from(random, {0, 1, 1, 2}));
  a.query_tokens = starts.back() + pick(random, 0, 1);
  if (a.query_tokens == 0) a.query_tokens = 1;
  const std::vector<int32_t> slots = shuffled(batch + 1, random);
  a.block_count = (batch + 1) * kv_heads * a.table_width;
  const std::vector<int32_t> table = shuffled(a.block_count, random);
  std::vector<int32_t> counts;
  for (int i = 0; i < a.slot_count * kv_heads; ++i) {
    counts.push_back(pick_from(random, {0, 1, 64, a.score_tokens, a.score_tokens, pick(random, 0, a.score_tokens)}));
    counts.back() = std::min(counts.back(), a.score_tokens);
  }
  const int rows = a.query_tokens;
  std::vector<float> scores(static_cast<size_t>(rows) * a.query_heads * a.score_tokens);
  std::vector<float> row_scores(static_cast<size_t>(a.score_tokens));
  for (size_t first = 0; first < scores.size(); first += row_scores.size()) {
    draw_scores(row_scores, random, test.flat);
    std::copy(row_scores.begin(), row_scores.end(), scores.begin() + static_cast<std::ptrdiff_t>(first));
  }
  std::vector<float> dense(static_cast<size_t>(rows) * a.query_heads);
  for (float& own : dense) own = pick_from(random, {-INFINITY, 0.0f, 3.0f, 14.0f, 40.0f, 100.0f, pick(random, 0, 30) == 0 ? NAN : 1.0f});
  std::vector<uint16_t> scales(static_cast<size_t>(a.block_count) * kValueBlockTokens);
  for (uint16_t& scale : scales) scale = static_cast<uint16_t>(pick(random, 0x3c00, 0x3fff));
  std::vector<int32_t> means(counts.size());
  for (int32_t& mean : means) mean = pick(random, -1, a.block_count * kValueBlockTokens - 1);
  a.capacity = test.has_room ? a.score_tokens + 1 : pick_from(random, {1, 2, 100, std::max(1, a.score_tokens / 3)});
  const bool has_dense = pick(random, 0, 2) != 0;
  const bool has_scales = pick(random, 0, 1) == 0;
  const bool has_ranges = pick(random, 0, 1) == 0;
  a.range_parts = pick_from(random, {1, 5, 40, 256});
  const std::vector<float> ranges = ranges_of(a, scores, starts, slots, counts);

  const size_t lists = static_cast<size_t>(rows) * kv_heads;
  std::vector<int32_t> value_rows(lists * a.capacity, -7);
  std::vector<float> weights(lists * a.capacity * group, -7);
  std::vector<int32_t> list_counts(lists, -7);
  std::vector<float> log_sum_exp(static_cast<size_t>(rows) * a.query_heads, -7);

  const DeviceBuffer<int32_t> starts_buffer(starts), slots_buffer(slots), table_buffer(table), counts_buffer(counts), means_buffer(means);
  const DeviceBuffer<float> scores_buffer(scores), dense_buffer(dense), ranges_buffer(ranges);
  const DeviceBuffer<uint16_t> scales_buffer(scales);
  const DeviceBuffer<int32_t> rows_buffer(value_rows), list_counts_buffer(list_counts);
  const DeviceBuffer<float> weights_buffer(weights), sums_buffer(log_sum_exp);
  SelectByMassArguments on_device = a;
  on_device.query_start = starts_buffer.get();
  on_device.slots = slots_buffer.get();
  on_device.block_table = table_buffer.get();
  on_device.key_counts = counts_buffer.get();
  on_device.scores = scores_buffer.get();
  on_device.dense_log_sum_exp = has_dense ? dense_buffer.get() : nullptr;
  on_device.ranges = has_ranges ? ranges_buffer.get() : nullptr;
  on_device.value_scales = has_scales ? scales_buffer.get() : nullptr;
  on_device.mean_rows = means_buffer.get();
  on_device.value_rows = rows_buffer.get();
  on_device.weights = weights_buffer.get();
  on_device.counts = list_counts_buffer.get();
  on_device.log_sum_exp = sums_buffer.get();
  succeeds(launch_for_python(select_by_mass, on_device, nullptr));
  succeeds(cudaDeviceSynchronize());

  a.query_start = starts.data();
  a.slots = slots.data();
  a.block_table = table.data();
  a.key_counts = counts.data();
  a.scores = scores.data();
  a.dense_log_sum_exp = has_dense ? dense.data() : nullptr;
  a.ranges = has_ranges ? ranges.data() : nullptr;
  a.value_scales = has_scales ? scales.data() : nullptr;
  a.mean_rows = means.data();
  a.value_rows = value_rows.data();
  a.weights = weights.data();
  a.counts = list_counts.data();
  a.log_sum_exp = log_sum_exp.data();
  Workers workers(2);
  baseline::select_by_mass(a, workers);
  Outcome outcome;
  const auto same = [](const auto& one, const auto& other) {
    return std::memcmp(one.data(), other.data(), one.size() * sizeof(one[0])) == 0;
  };
  outcome.expect(same(list_counts_buffer.host(), list_counts), "other counts than the CPU");
  outcome.expect(same(rows_buffer.host(), value_rows), "other rows than the CPU");
  outcome.expect(same(weights_buffer.host(), weights), "other weights than the CPU");
  const std::vector<float> sums = sums_buffer.host();
  for (size_t i = 0; i < sums.size(); ++i) {
    if (std::isnan(sums[i]) ? std::isnan(log_sum_exp[i]) : sums[i] == log_sum_exp[i]) continue;
    outcome.expect(false, "log-sum-exp " + std::to_string(i) + " is " + std::to_string(sums[i]) + ", on the CPU " + std::to_string(log_sum_exp[i]));
    break;
  }
  outcome.detail += " " + std::to_string(std::accumulate(list_counts.begin(), list_counts.end(), int64_t{0})) + " tokens";
  return outcome;
}

std::vector<Case> cases() {
  struct Group {
    int count;
    int most_tokens;
    int most_rows;
    bool flat;
  };
  const std::vector<Group> all{{60, 300, 4, false}, {40, 20000, 2, false}, {10, 300000, 1, false}, {12, 300000, 1, true}};
  const std::vector<Group> small{{6, 300, 2, false}, {2, 9000, 1, false}, {4, 80000, 1, true}};
  std::vector<Case> list;
  for (const Group& group : only_small_cases() ? small : all) {
    for (int i = 1; i <= group.count; ++i) {
      const bool has_room = i % 2 == 0;
      list.push_back({"up to " + std::to_string(group.most_tokens) + " tokens" + (group.flat ? ", flat" : "") +
                          (has_room ? "" : ", some lists too short") + ", " + std::to_string(i),
                      group.most_tokens, group.most_rows, has_room, group.flat});
    }
  }
  return list;
}

int32_t size(const int64_t* sizes, int i) { return static_cast<int32_t>(sizes[i]); }

}  // namespace

TEST("select-by-mass takes what the CPU takes, with the same weights") { run_cases(cases(), choose); }

}  // namespace kv::tests

// sizes: rows, query heads, kv heads, score tokens, table width, value blocks, capacity, parts of ranges or 0.
// pointers: scores, dense log-sum-exp, block table, key counts, slots, query start, value rows, weights, counts, log-sum-exp, and
// ranges where they have parts.
KV_FOR_PYTHON int kv_select_by_mass(const int64_t* sizes, void* const* pointers, double tau, void* stream) {
  kv::SelectByMassArguments a;
  a.query_tokens = a.batch = a.slot_count = kv::tests::size(sizes, 0);
  a.query_heads = kv::tests::size(sizes, 1);
  a.kv_heads = kv::tests::size(sizes, 2);
  a.score_tokens = kv::tests::size(sizes, 3);
  a.table_width = kv::tests::size(sizes, 4);
  a.block_count = kv::tests::size(sizes, 5);
  a.capacity = kv::tests::size(sizes, 6);
  a.scores = static_cast<const float*>(pointers[0]);
  a.dense_log_sum_exp = static_cast<const float*>(pointers[1]);
  a.block_table = static_cast<const int32_t*>(pointers[2]);
  a.key_counts = static_cast<int32_t*>(pointers[3]);
  a.slots = static_cast<const int32_t*>(pointers[4]);
  a.query_start = static_cast<const int32_t*>(pointers[5]);
  a.value_rows = static_cast<int32_t*>(pointers[6]);
  a.weights = static_cast<float*>(pointers[7]);
  a.counts = static_cast<int32_t*>(pointers[8]);
  a.log_sum_exp = static_cast<float*>(pointers[9]);
  a.tau = tau;
  a.range_parts = kv::tests::size(sizes, 7);
  if (a.range_parts > 0) a.ranges = static_cast<const float*>(pointers[10]);
  return kv::tests::result_for_python(kv::tests::launch_for_python(kv::select_by_mass, a, stream));
}

namespace {

// A CPU device whose workers the functions below share.
struct Host {
  std::shared_ptr<kv::Device> device;
  std::shared_ptr<kv::Queue> queue;

  explicit Host(int threads) : device(kv::create_cpu_device(threads, kv::best_isa(), 0)), queue(device->create_queue()) {}
};

Host& host_of(int threads) {
  static std::unique_ptr<Host> host;
  if (host == nullptr || host->device->workers().count() != threads) host = std::make_unique<Host>(threads);
  return *host;
}

template <class Arguments>
int on_host(kv::Status (*operation)(const Arguments&, kv::ExecutionContext&), const Arguments& arguments, int threads) {
  Host& host = host_of(threads);
  kv::ExecutionContext context{host.device->workers()};
  context.isa = host.device->isa();
  context.queue = host.queue.get();
  return kv::tests::result_for_python(operation(arguments, context));
}

}  // namespace

// sizes: rows, kv heads, group, capacity, dim, pool rows, dtype, threads. pointers, of host memory: value rows, weights,
// counts, values, output.
KV_FOR_PYTHON int kv_weighted_values(const int64_t* sizes, void* const* pointers) {
  kv::WeightedValuesArguments a;
  a.rows = kv::tests::size(sizes, 0);
  a.kv_heads = kv::tests::size(sizes, 1);
  a.group = kv::tests::size(sizes, 2);
  a.capacity = kv::tests::size(sizes, 3);
  a.head_dim = kv::tests::size(sizes, 4);
  a.pool_rows = sizes[5];
  a.dtype = static_cast<kv::DType>(sizes[6]);
  a.value_rows = static_cast<const int32_t*>(pointers[0]);
  a.weights = static_cast<const float*>(pointers[1]);
  a.counts = static_cast<const int32_t*>(pointers[2]);
  a.values = pointers[3];
  a.output = static_cast<float*>(pointers[4]);
  return on_host(kv::weighted_values, a, kv::tests::size(sizes, 7));
}

// sizes: those of kv_weighted_values. pointers, of host memory: value rows, counts, query f32, keys f16, values, output,
// log-sum-exp.
KV_FOR_PYTHON int kv_decode_attention_listed(const int64_t* sizes, void* const* pointers, float scale) {
  kv::DecodeAttentionListedArguments a;
  a.rows = kv::tests::size(sizes, 0);
  a.kv_heads = kv::tests::size(sizes, 1);
  a.group = kv::tests::size(sizes, 2);
  a.capacity = kv::tests::size(sizes, 3);
  a.head_dim = kv::tests::size(sizes, 4);
  a.pool_rows = sizes[5];
  a.value_dtype = static_cast<kv::DType>(sizes[6]);
  a.key_dtype = kv::DType::f16;
  a.value_rows = static_cast<const int32_t*>(pointers[0]);
  a.counts = static_cast<const int32_t*>(pointers[1]);
  a.query = pointers[2];
  a.query_head_stride = a.head_dim;
  a.query_row_stride = int64_t{a.kv_heads} * a.group * a.head_dim;
  a.keys = pointers[3];
  a.values = pointers[4];
  a.output = static_cast<float*>(pointers[5]);
  a.log_sum_exp = static_cast<float*>(pointers[6]);
  a.scale = scale;
  return on_host(kv::decode_attention_listed, a, kv::tests::size(sizes, 7));
}

// Reads bytes in order, shared among the threads: what the host's memory gives at most. Returns their sum.
KV_FOR_PYTHON uint64_t kv_read_in_order(const uint64_t* words, int64_t count, int threads) {
  constexpr int64_t kShare = 32768;
  kv::Workers& workers = host_of(threads).device->workers();
  const auto shares = static_cast<size_t>((count + kShare - 1) / kShare);
  std::vector<uint64_t> sums(shares);
  workers.for_each(shares, [&](size_t share, int) {
    const int64_t first = static_cast<int64_t>(share) * kShare;
    uint64_t sum = 0;
    for (int64_t i = first; i < std::min(count, first + kShare); ++i) sum += words[i];
    sums[share] = sum;
  });
  return std::accumulate(sums.begin(), sums.end(), uint64_t{0});
}
