#include "kernels/quantized-key-scores/quantized-key-scores.h"

#include "runtime/workers.h"
#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/decode/key-run.cpu.h"
#include "shared/quantized-blocks/quantized-blocks.cpu.h"
#include "shared/quantized-blocks/quantized-rows.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kTaskBlocks = 16;  // of one kv head of one batch entry

// The queries of a token that read one kv head, scaled, and rotated if keys are.
template <class T>
void load_queries(const QuantizedKeyScoresArguments& a, int64_t token, int64_t first_head, int dim, float* queries) {
  const int64_t group = a.query_heads / a.kv_heads;
  for (int64_t row = 0; row < group; ++row) {
    float* to = queries + row * dim;
    load_row(static_cast<const T*>(a.query) + token * a.query_token_stride + (first_head + row) * a.query_head_stride, to,
             a.head_dim, dim);
    for (int d = 0; d < dim; d += kLanes) store(to + d, load(to + d) * a.scale);
    if (a.rotated) rotate(to, a.head_dim);
  }
}

// Scores of up to kRowGroup rows with a block. One loop for all dims: keys of every width, each in straight code, would be large.
template <class Keys>
void score_block(const float* queries, int64_t rows, const Keys& keys, int dim, float* scores, int64_t score_stride) {
  switch (rows) {
    case 1:
      return score_dims<1, 0>(queries, keys, dim, scores, score_stride);
    case 2:
      return score_dims<2, 0>(queries, keys, dim, scores, score_stride);
    case 3:
      return score_dims<3, 0>(queries, keys, dim, scores, score_stride);
    default:
      return score_dims<kRowGroup, 0>(queries, keys, dim, scores, score_stride);
  }
}

template <int kBits>
void score_task(const QuantizedKeyScoresArguments& a, int entry, int head, int task, Workers& workers, int worker) {
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  const int32_t* table = a.block_table + cache_head * a.table_width;
  const int blocks = a.key_counts[cache_head] / kQuantizedBlockTokens;
  const int first = task * kTaskBlocks;
  const int end = first + kTaskBlocks < blocks ? first + kTaskBlocks : blocks;
  if (first >= end) return;
  const int64_t group = a.query_heads / a.kv_heads;
  const int groups = quantized_groups(a.head_dim);
  const int dim = groups * kQuantizedGroupDims;
  const int64_t floats = group * dim + int64_t{kQuantizedBlockTokens} * groups;
  auto* queries = static_cast<float*>(workers.scratch(worker, static_cast<size_t>(floats) * sizeof(float)));
  float* scales = queries + group * dim;
  const QuantizedPool<kBits> pool(a.keys, a.head_dim);
  for (int64_t token = a.query_start[entry]; token < a.query_start[entry + 1]; ++token) {
    with_float_type(a.query_dtype,
                    [&](auto element) { load_queries<decltype(element)>(a, token, head * group, dim, queries); });
    for (int number = first; number < end; ++number) {
      const auto keys = pool.open(table[number], pool.block(table[number + 1 < end ? number + 1 : first]), scales);
      for (int64_t row = 0; row < group; row += kRowGroup) {
        float* scores = a.scores + token * a.score_token_stride + (head * group + row) * a.score_head_stride +
                        int64_t{number} * kQuantizedBlockTokens;
        score_block(queries + row * dim, group - row, keys, dim, scores, a.score_head_stride);
      }
    }
  }
}

}  // namespace

void quantized_key_scores(const QuantizedKeyScoresArguments& a, Workers& workers) {
  const auto has_rows = [&](int entry) { return a.query_start[entry] < a.query_start[entry + 1]; };
  const int64_t tasks = divide_up(most_keys(a) / kQuantizedBlockTokens, kTaskBlocks);
  const int64_t tasks_of_entry = a.kv_heads * tasks;
  workers.for_each(static_cast<size_t>(a.batch * tasks_of_entry), [&](size_t index, int worker) {
    const auto entry = static_cast<int>(static_cast<int64_t>(index) / tasks_of_entry);
    if (!has_rows(entry)) return;
    const auto head = static_cast<int>(static_cast<int64_t>(index) / tasks % a.kv_heads);
    const auto task = static_cast<int>(static_cast<int64_t>(index) % tasks);
    with_code_bits(a.key_bits, [&](auto bits) { score_task<decltype(bits)::count>(a, entry, head, task, workers, worker); });
  });
}

}  // namespace KV_ISA
}  // namespace kv
