#include "kernels/block-scores/block-scores.h"

#include "runtime/workers.h"
#include "shared/attention/attention-rows.cpu.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kTaskBlocks = 64;  // of one kv head of one batch entry
constexpr int kRound = kScoreChunk * kScoreLanes;

// The query of one head, expanded. `to` is padded with zeros to whole rounds.
template <class T>
void expand_query(const BlockScoresArguments& a, int64_t token, int64_t head, float* to) {
  const T* query = static_cast<const T*>(a.query) + token * a.query_token_stride + head * a.query_head_stride;
  for (int32_t dim = 0; dim < a.head_dim; ++dim) {
    const float q = to_float(query[dim]);
    to[dim] = a.vectors == 1 ? q : q < 0 ? q : 0 * q;
    if (a.vectors == 2) to[a.head_dim + dim] = q < 0 ? 0 * q : q;
  }
}

float bound(const float* query, const float* metadata, int64_t padded) {
  float lanes[kScoreLanes] = {};
  float products[kRound];
  for (int64_t first = 0; first < padded; first += kRound) {
    for (int i = 0; i < kRound; ++i) products[i] = query[first + i] * metadata[first + i];
    for (int i = 0; i < kScoreChunk; ++i) {
      for (int lane = 0; lane < kScoreLanes; ++lane) lanes[lane] += products[lane * kScoreChunk + i];
    }
  }
  for (int distance = kScoreLanes / 2; distance > 0; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) lanes[lane] += lanes[lane + distance];
  }
  return lanes[0];
}

template <class T>
void load_metadata(const BlockScoresArguments& a, int32_t number, float* to) {
  const T* from = static_cast<const T*>(a.metadata) + int64_t{number} * a.products();
  int32_t i = 0;
  for (; i + kLanes <= a.products(); i += kLanes) store(to + i, load(from + i));
  for (; i < a.products(); ++i) to[i] = to_float(from[i]);
}

void score_task(const BlockScoresArguments& a, int entry, int head, int task, Workers& workers, int worker) {
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  const int32_t* table = a.block_table + cache_head * a.table_width;
  const int32_t blocks = a.key_counts[cache_head] / a.block_tokens;
  const int32_t first = task * kTaskBlocks;
  const int32_t end = first + kTaskBlocks < blocks ? first + kTaskBlocks : blocks;
  if (first >= end) return;
  const int64_t group = a.query_heads / a.kv_heads;
  const int64_t padded = divide_up(a.products(), kRound) * kRound;
  const size_t bytes = static_cast<size_t>((group + 1) * padded) * sizeof(float);
  auto* queries = static_cast<float*>(workers.scratch(worker, bytes));
  std::memset(queries, 0, bytes);
  float* metadata = queries + group * padded;
  for (int64_t token = a.query_start[entry]; token < a.query_start[entry + 1]; ++token) {
    with_float_type(a.query_dtype, [&](auto element) {
      for (int64_t row = 0; row < group; ++row) expand_query<decltype(element)>(a, token, head * group + row, queries + row * padded);
    });
    float* scores = a.scores + token * a.score_token_stride + head * a.score_head_stride;
    for (int32_t block = first; block < end; ++block) {
      with_float_type(a.cache_dtype, [&](auto element) { load_metadata<decltype(element)>(a, table[block], metadata); });
      float best = -__builtin_inff();
      for (int64_t row = 0; row < group; ++row) {
        const float score = bound(queries + row * padded, metadata, padded);
        best = score > best ? score : best;
      }
      scores[block] = best + 0.0f;
    }
  }
}

}  // namespace

void block_scores(const BlockScoresArguments& a, Workers& workers) {
  const auto has_rows = [&](int entry) { return a.query_start[entry] < a.query_start[entry + 1]; };
  int32_t longest = 0;
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    if (!has_rows(entry)) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) {
      const int32_t count = a.key_counts[int64_t{a.slots[entry]} * a.kv_heads + head];
      if (count > longest) longest = count;
    }
  }
  const int64_t tasks = divide_up(longest / a.block_tokens, kTaskBlocks);
  const int64_t tasks_of_entry = a.kv_heads * tasks;
  workers.for_each(static_cast<size_t>(a.batch * tasks_of_entry), [&](size_t index, int worker) {
    const auto entry = static_cast<int>(static_cast<int64_t>(index) / tasks_of_entry);
    if (!has_rows(entry)) return;
    const auto head = static_cast<int>(static_cast<int64_t>(index) / tasks % a.kv_heads);
    score_task(a, entry, head, static_cast<int>(static_cast<int64_t>(index) % tasks), workers, worker);
  });
}

}  // namespace KV_ISA
}  // namespace kv
