// Plans a step's reads of blocks of which all are in host memory and some on the device. The device's pool of blocks begins
// with fixed places for the first and the last blocks of each sequence; behind them is a cache of the others. Chosen blocks
// that the cache has are hits. The others take the places of the blocks that were not chosen for longest, of equal ones
// those of lower places, and places that hold nothing, or what was never chosen, first: in the order of the batch's lists they get those
// places in ascending order. Nothing that is chosen in this step leaves, and what several lists choose is loaded once.
#pragma once

#include <string>

#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"

namespace kv {

constexpr int32_t kWorkingSetSteps = 12;

// What a kv head of a slot has counted.
struct BlockDemand {
  int32_t steps;        // that were planned
  int32_t working_set;  // blocks of the cache that the last kWorkingSetSteps of them chose, each counted once
  int32_t hits;         // wraps past 2^31
  int32_t misses;
};

enum class PlanBlocksFault : int32_t {
  list_out_of_range = static_cast<int32_t>(PagedFault::operations_own),  // value: the slot
  cache_too_small,                                                       // limit: its blocks
};

std::string describe_plan_blocks_fault(const Fault& fault);

// The batch's entries have at most one row. Its table names host blocks, of which there are `block_count`.
struct PlanBlocksArguments : PagedBatch {
  // From select-top-blocks: [slot, kv_head, room] ascending numbers within the sequence, and how many.
  const int32_t* chosen = nullptr;
  const int32_t* chosen_counts = nullptr;
  int32_t room = 0;
  int32_t sink_blocks = 0;
  int32_t recent_blocks = 1;
  // The cache: the `cached` places from `first_cached` on. Before them each kv head of each slot has sink_blocks +
  // recent_blocks places.
  int32_t first_cached = 0;
  int32_t cached = 0;
  int32_t* where = nullptr;    // [host_block]: its place, or -1
  int32_t* holds = nullptr;    // [cached]: the host block of a place, if `where` says so too
  int32_t* used_at = nullptr;  // [cached]: the step that last chose it
  int32_t* clock = nullptr;    // [1]: steps so far
  int32_t* history = nullptr;  // [slot, kv_head, kWorkingSetSteps, room]: chosen blocks of the cache; -1 for others
  BlockDemand* demand = nullptr;  // [slot, kv_head]

  int32_t* read_table = nullptr;   // [slot, kv_head, room]: places, for attention
  int32_t* read_counts = nullptr;  // [slot, kv_head]: their tokens
  int32_t* loads = nullptr;        // [host_block | place, load]
  int32_t most_loads = 0;          // batch * kv_heads * room or more
  int32_t* load_count = nullptr;   // [1]

  // Where a block that does not pass through the cache always is; -1 for others.
  constexpr int32_t fixed_place(int64_t cache_head, int32_t block, int32_t blocks) const {
    if (block >= sink_blocks && block < blocks - recent_blocks) return -1;
    const auto first = static_cast<int32_t>(cache_head) * (sink_blocks + recent_blocks);
    return first + (block < sink_blocks ? block : sink_blocks + block % recent_blocks);
  }
  constexpr bool is_cached(int32_t place) const { return place >= first_cached && place < first_cached + cached; }
  // Tokens of `count` chosen blocks, the last of which may not be full.
  constexpr int32_t tokens_of(int32_t count, int32_t tokens, int32_t blocks) const {
    return count == 0 ? 0 : count * block_tokens - (blocks * block_tokens - tokens);
  }
};

// Refuses sizes and tables that contradict each other, and more blocks than the cache has (invalid_value).
Status plan_blocks(const PlanBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
