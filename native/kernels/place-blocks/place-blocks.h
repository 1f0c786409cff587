// Gives the blocks that rows of a batch have filled places of the cache of plan-blocks, as long as places hold nothing: an
// answer then finds them there. All kv heads get as many, the first blocks of a sequence before later ones, and places are
// taken in ascending order. What is in a place so was never chosen: it leaves before all that was.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// The batch's table names host blocks, of which there are `block_count`, and its key counts include its rows. No two entries
// fill the same block.
struct PlaceBlocksArguments : PagedBatch {
  const int32_t* source_table = nullptr;  // [slot, kv_head, table_width]: where the blocks come from
  int32_t sink_blocks = 0;                // have places of their own
  // The cache, as plan-blocks knows it.
  int32_t first_cached = 0;
  int32_t cached = 0;
  int32_t* where = nullptr;
  int32_t* holds = nullptr;
  int32_t* used_at = nullptr;

  int32_t* loads = nullptr;       // [source block | place, load]
  int32_t most_loads = 0;         // batch * kv_heads * table_width or more
  int32_t* load_count = nullptr;  // [1]

  constexpr bool is_cached(int32_t place) const { return place >= first_cached && place < first_cached + cached; }
};

// Refuses tables and counts that lead outside (invalid_value). What the sources are is for whoever copies them.
Status place_blocks(const PlaceBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
