#include "kernels/block-scores/block-scores.h"

#include "runtime/workers.h"
#include "shared/attention/attention-rows.cpu.h"
#include "shared/cpu/simd.cpu.h"
#include "shared/cpu/transpose.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kTaskBlocks = 64;  // of one kv head of one batch entry

// Of a worker, in f32. Products are padded with zeros to whole chunks.
struct Scratch {
  int64_t padded;
  float* queries;   // [row, product]: the query heads of a kv head, expanded
  float* products;  // [product, lane]: the metadata of kLanes blocks

  Scratch(const BlockScoresArguments& a, int64_t group, Workers& workers, int worker)
      : padded(divide_up(a.products(), kScoreChunk) * kScoreChunk) {
    const size_t bytes = static_cast<size_t>((group + kLanes) * padded) * sizeof(float);
    queries = static_cast<float*>(workers.scratch(worker, bytes));
    products = queries + group * padded;
    if (padded != a.products()) std::memset(queries, 0, bytes);
  }
};

// The query of one head, expanded.
template <class T>
void expand_query(const BlockScoresArguments& a, int64_t token, int64_t head, float* to) {
  const T* query = static_cast<const T*>(a.query) + token * a.query_token_stride + head * a.query_head_stride;
  for (int32_t dim = 0; dim < a.head_dim; ++dim) {
    const float q = to_float(query[dim]);
    to[dim] = a.vectors == 1 ? q : q < 0 ? q : 0 * q;
    if (a.vectors == 2) to[a.head_dim + dim] = q < 0 ? 0 * q : q;
  }
}

// Puts the metadata of up to kLanes blocks side by side. Lanes of others have that of the first one.
template <class T>
void load_blocks(const BlockScoresArguments& a, const int32_t* table, int32_t count, float* to) {
  const T* blocks[kLanes];
  for (int32_t lane = 0; lane < kLanes; ++lane) {
    blocks[lane] = static_cast<const T*>(a.metadata) + int64_t{table[lane < count ? lane : 0]} * a.products();
  }
  int32_t first = 0;
  for (; first + kLanes <= a.products(); first += kLanes) {
    Vec rows[kLanes];
#pragma GCC unroll 16
    for (int lane = 0; lane < kLanes; ++lane) rows[lane] = load(blocks[lane] + first);
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(to + (first + i) * kLanes, rows[i]);
  }
  for (; first < a.products(); ++first) {
    for (int lane = 0; lane < kLanes; ++lane) to[first * kLanes + lane] = to_float(blocks[lane][first]);
  }
}

// Bounds of a query with kLanes blocks.
Vec bounds(const float* query, const float* products, int64_t padded) {
  Vec lanes[kScoreLanes] = {};
  for (int64_t chunk = 0; chunk * kScoreChunk < padded; ++chunk) {
    Vec sum = lanes[chunk % kScoreLanes];
    for (int64_t i = chunk * kScoreChunk; i < (chunk + 1) * kScoreChunk; ++i) sum += query[i] * load(products + i * kLanes);
    lanes[chunk % kScoreLanes] = sum;
  }
  for (int distance = kScoreLanes / 2; distance > 0; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) lanes[lane] += lanes[lane + distance];
  }
  return lanes[0];
}

void score_task(const BlockScoresArguments& a, int entry, int head, int task, Workers& workers, int worker) {
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  const int32_t* table = a.block_table + cache_head * a.table_width;
  const int32_t blocks = a.key_counts[cache_head] / a.block_tokens;
  const int32_t first = task * kTaskBlocks;
  const int32_t end = first + kTaskBlocks < blocks ? first + kTaskBlocks : blocks;
  if (first >= end) return;
  const int64_t group = a.query_heads / a.kv_heads;
  const Scratch scratch(a, group, workers, worker);
  for (int64_t token = a.query_start[entry]; token < a.query_start[entry + 1]; ++token) {
    with_float_type(a.query_dtype, [&](auto element) {
      for (int64_t row = 0; row < group; ++row) expand_query<decltype(element)>(a, token, head * group + row, scratch.queries + row * scratch.padded);
    });
    float* scores = a.scores + token * a.score_token_stride + head * a.score_head_stride;
    for (int32_t block = first; block < end; block += kLanes) {
      const int32_t count = end - block < kLanes ? end - block : kLanes;
      with_float_type(a.cache_dtype, [&](auto element) { load_blocks<decltype(element)>(a, table + block, count, scratch.products); });
      Vec best = splat(-__builtin_inff());
      for (int64_t row = 0; row < group; ++row) best = maximum(best, bounds(scratch.queries + row * scratch.padded, scratch.products, scratch.padded));
      best += splat(0.0f);
      for (int32_t lane = 0; lane < count; ++lane) scores[block + lane] = best[lane];
    }
  }
}

}  // namespace

void block_scores(const BlockScoresArguments& a, Workers& workers) {
  const auto has_rows = [&](int entry) { return a.query_start[entry] < a.query_start[entry + 1]; };
  const int64_t tasks = divide_up(most_keys(a) / a.block_tokens, kTaskBlocks);
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
