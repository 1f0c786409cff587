// Chooses the blocks that a kv head reads, in ascending order: the first `sink_blocks`, the last `recent_blocks`, and of
// those between them the ones of the largest scores, of equal scores the lower one; as many as the slot's budget says. All
// of them where they fit.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// The batch's entries have at most one row. Of its tables only key counts, slots and rows have a meaning, and table_width,
// which is that of the scores.
struct SelectTopBlocksArguments : PagedBatch {
  const float* scores = nullptr;  // [token, kv_head, table_width], block contiguous. A NaN is below all numbers.
  int64_t score_token_stride = 0;
  int64_t score_head_stride = 0;
  int32_t sink_blocks = 0;
  int32_t recent_blocks = 1;         // 1 or more: the block that is not full has no score
  int32_t room = 0;                  // blocks of a list: sink_blocks + recent_blocks or more
  const int32_t* budgets = nullptr;  // [slot]: blocks that each of its kv heads reads
  int32_t* chosen = nullptr;         // [slot, kv_head, room]: numbers within the sequence
  int32_t* chosen_counts = nullptr;  // [slot, kv_head]

  // The budget of a slot, at least what is always read and at most what a list has room for.
  constexpr int32_t budget_of(int32_t slot) const {
    const int32_t least = sink_blocks + recent_blocks;
    return budgets[slot] < least ? least : budgets[slot] > room ? room : budgets[slot];
  }
};

// Refuses sizes and tables that contradict each other (invalid_value).
Status select_top_blocks(const SelectTopBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
