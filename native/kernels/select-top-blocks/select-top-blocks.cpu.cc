#include "kernels/select-top-blocks/select-top-blocks.h"

#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"
#include "shared/scores/score-order.h"

namespace kv {
namespace KV_ISA {
namespace {

// Greater means better. NaN has the least.
uint32_t order_of_score(float score) {
  if (score != score) return 0;
  const float unsigned_zero = score + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &unsigned_zero, sizeof bits);
  return order_of(bits);
}

// The order that `wanted` of `count` scores reach, and how many are above it.
struct Cut {
  uint32_t order = 0;
  int32_t above = 0;

  Cut(const float* scores, int32_t count, int32_t wanted) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      int32_t bins[256] = {};
      for (int32_t i = 0; i < count; ++i) {
        const uint32_t own = order_of_score(scores[i]);
        if (shift == 24 || (own ^ order) >> (shift + 8) == 0) ++bins[own >> shift & 255];
      }
      uint32_t bin = 255;
      while (above + bins[bin] < wanted) above += bins[bin--];
      order |= bin << shift;
    }
  }
};

void select_head(const SelectTopBlocksArguments& a, int32_t entry, int32_t head) {
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  int32_t* chosen = a.chosen + cache_head * a.room;
  const int32_t blocks = static_cast<int32_t>((int64_t{a.key_counts[cache_head]} + a.block_tokens - 1) / a.block_tokens);
  const int32_t budget = a.budget_of(a.slots[entry]);
  int32_t count = 0;
  if (blocks <= budget) {
    for (; count < blocks; ++count) chosen[count] = count;
  } else {
    const int32_t end = blocks - a.recent_blocks;
    const float* scores = a.scores + a.query_start[entry] * a.score_token_stride + head * a.score_head_stride;
    const int32_t wanted = budget - a.sink_blocks - a.recent_blocks;
    for (; count < a.sink_blocks; ++count) chosen[count] = count;
    if (wanted > 0) {
      const Cut cut(scores + a.sink_blocks, end - a.sink_blocks, wanted);
      int32_t equal = wanted - cut.above;
      for (int32_t block = a.sink_blocks; block < end; ++block) {
        const uint32_t own = order_of_score(scores[block]);
        if (own > cut.order || (own == cut.order && equal-- > 0)) chosen[count++] = block;
      }
    }
    for (int32_t block = end; block < blocks; ++block) chosen[count++] = block;
  }
  a.chosen_counts[cache_head] = count;
}

}  // namespace

void select_top_blocks(const SelectTopBlocksArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.batch) * static_cast<size_t>(a.kv_heads), [&](size_t index, int) {
    const auto entry = static_cast<int32_t>(index) / a.kv_heads;
    if (a.query_start[entry] < a.query_start[entry + 1]) select_head(a, entry, static_cast<int32_t>(index) % a.kv_heads);
  });
}

}  // namespace KV_ISA
}  // namespace kv
