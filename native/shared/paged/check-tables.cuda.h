// Checks whether the numbers in a batch's tables are in range: the conditions for one entry, and a kernel that checks
// a whole batch. It works for any kind of block. Device code.
#pragma once

#include "ptx/dependent-launch.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-attention.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {

constexpr int kCheckThreads = 512;

struct TableCheck {
  PagedBatch batch;
  CheckedTables tables;
  FaultSink faults;
  bool looks_without_rows = false;  // checks slots of entries without rows too; else such entries count no keys
  bool whole_blocks = false;        // counts must be whole blocks
};

inline __device__ bool rows_ascend(const PagedBatch& b, int entry) {
  const int32_t first = b.query_start[entry];
  const int32_t end = b.query_start[entry + 1];
  return first >= 0 && end >= first && end <= b.query_tokens;
}

inline __device__ bool slot_exists(const PagedBatch& b, int entry) {
  return b.slots[entry] >= 0 && b.slots[entry] < b.slot_count;
}

// Writes the part of one thread block, which has one batch entry and kv head. An empty table has no rows, and no keys
// in slot 0.
inline __device__ void write_tables(const CheckedTables& to, const PagedBatch& b, int entry, int head, bool empty, int32_t count) {
  const int32_t slot = empty ? 0 : b.slots[entry];
  if (!empty || entry == 0) to.key_counts[int64_t{slot} * b.kv_heads + head] = empty ? 0 : count;
  if (head != 0) return;
  to.slots[entry] = slot;
  to.query_start[entry + 1] = empty ? 0 : b.query_start[entry + 1];
  if (entry == 0) to.query_start[0] = empty ? 0 : b.query_start[0];
}

// One thread block for each batch entry and kv head. `blocks.check(entry, whole, faults)` returns whether an entry of
// its table names a block of a pool, and reports a fault if not. `whole` says that all tokens of the block count.
template <class Blocks>
__global__ void __launch_bounds__(kCheckThreads)
    check_tables(const __grid_constant__ TableCheck c, const __grid_constant__ Blocks blocks) {
  ptx::follow_previous_kernel();
  const PagedBatch& b = c.batch;
  const int entry = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  bool ascends = true;
  bool known = true;
  for (int i = thread; i < b.batch; i += kCheckThreads) {
    ascends = ascends && rows_ascend(b, i);
    known = known && slot_exists(b, i);
  }
  ascends = __syncthreads_and(ascends);
  known = __syncthreads_and(known);
  int32_t count = 0;
  if (ascends && known && (c.looks_without_rows || b.query_start[entry + 1] > b.query_start[entry])) {
    const int64_t cache_head = int64_t{b.slots[entry]} * b.kv_heads + head;
    count = b.key_counts[cache_head];
    const bool part = c.whole_blocks && count % b.block_tokens != 0;
    const bool fits = !part && count >= 0 && count <= int64_t{b.table_width} * b.block_tokens;
    bool inside = true;
    if (fits) {
      for (int64_t i = thread; i * b.block_tokens < count; i += kCheckThreads) {
        const bool whole = (i + 1) * b.block_tokens <= count;
        if (!blocks.check(cache_head * b.table_width + i, whole, c.faults)) inside = false;
      }
    } else if (thread == 0) {
      report_fault(c.faults, part ? PagedFault::part_of_block : PagedFault::cache_overflow, b.slots[entry], 0,
                   b.block_tokens);
    }
    inside = __syncthreads_and(inside);
    if (!fits || !inside) count = 0;
  }
  if (thread != 0) return;
  if (!ascends) {
    report_fault(c.faults, PagedFault::rows_not_ascending, 0, 0, b.query_tokens);
  } else if (!known) {
    report_fault(c.faults, PagedFault::slot_out_of_range, b.slots[entry], 0, b.slot_count);
  }
  write_tables(c.tables, b, entry, head, !ascends || !known, count);
}

}  // namespace kv
