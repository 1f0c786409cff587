// What kernels that append to a cache do with its tables. Device code.
#pragma once

#include "kernels/append-kv/append-kv.h"
#include "ptx/async-copy.cuda.h"
#include "shared/paged/check-tables.cuda.h"

namespace kv {

// Checks this thread's share of the batch, and whether the rows of one entry have room. Reports what is wrong. False
// for an entry without rows, which has nothing to write.
__device__ inline bool looks_sound(const AppendKvArguments& a, int entry, int64_t cache_head, FaultSink faults) {
  for (int i = static_cast<int>(threadIdx.x); i < a.batch; i += static_cast<int>(blockDim.x)) {
    if (!rows_ascend(a, i)) {
      report_fault(faults, PagedFault::rows_not_ascending, 0, 0, a.query_tokens);
      return false;
    }
    if (!slot_exists(a, i)) {
      report_fault(faults, PagedFault::slot_out_of_range, a.slots[i], 0, a.slot_count);
      return false;
    }
    if (i != entry && a.slots[i] == a.slots[entry] && a.query_start[i + 1] > a.query_start[i] &&
        a.query_start[entry + 1] > a.query_start[entry]) {
      report_fault(faults, AppendKvFault::slot_twice, a.slots[i]);
      return false;
    }
  }
  if (!rows_ascend(a, entry) || !slot_exists(a, entry)) return false;
  if (a.query_start[entry + 1] == a.query_start[entry]) return false;
  const int32_t count = a.key_counts[cache_head];
  const int64_t end = int64_t{count} + a.query_start[entry + 1] - a.query_start[entry];
  if (count < 0 || end > int64_t{a.table_width} * a.block_tokens) {
    report_fault(faults, PagedFault::cache_overflow, a.slots[entry]);
    return false;
  }
  // Entries of the table before the first row's block are not checked: they may name blocks of another pool.
  const int32_t* table = a.block_table + cache_head * a.table_width;
  for (int64_t i = count / a.block_tokens + threadIdx.x; i * a.block_tokens < end; i += blockDim.x) {
    if (table[i] >= 0 && table[i] < a.block_count) continue;
    report_fault(faults, PagedFault::block_out_of_range, table[i]);
    return false;
  }
  return true;
}

// Where the tables speak of an entry and kv head, by what they hold while the kernels ahead may still write there: it only
// says where to look. Null if that is nowhere.
struct TablesAhead {
  const int32_t* count = nullptr;
  const int32_t* block = nullptr;
};

// For one thread. Brings the lines to L2: a step's other layers have pushed them out.
__device__ inline TablesAhead prefetch_tables(const AppendKvArguments& a, int entry, int head) {
  TablesAhead ahead;
  if (threadIdx.x != 0) return ahead;
  const int32_t slot = __ldcg(a.slots + entry);
  if (slot < 0 || slot >= a.slot_count) return ahead;
  const int64_t cache_head = int64_t{slot} * a.kv_heads + head;
  ahead.count = a.key_counts + cache_head;
  const int32_t count = __ldcg(ahead.count);
  if (count < 0 || count / a.block_tokens >= a.table_width) return ahead;
  ahead.block = a.block_table + cache_head * a.table_width + count / a.block_tokens;
  ptx::prefetch_line_to_l2(ahead.block);
  return ahead;
}

// Once the kernels ahead are complete: brings the lines to L1 at once, where one else says where the next is.
__device__ inline void fetch_tables(const TablesAhead& ahead) {
  if (ahead.count != nullptr) ptx::prefetch_line(ahead.count);
  if (ahead.block != nullptr) ptx::prefetch_line(ahead.block);
}

}  // namespace kv
