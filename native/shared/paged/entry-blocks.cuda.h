// What a CUDA kernel reads of one kv head of a batch entry. Device code.
#pragma once

#include "runtime/fault.h"
#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"

namespace kv {

struct EntryBlocks {
  int32_t first_row = 0;
  int32_t rows = 0;
  int32_t tokens = 0;      // that the kv head holds
  int64_t cache_head = 0;  // of the tables

  // No rows, and a fault, if the batch's numbers are out of range.
  __device__ EntryBlocks(const PagedBatch& a, int entry, int head, FaultSink faults) {
    const int32_t first = a.query_start[entry];
    const int32_t end = a.query_start[entry + 1];
    const int32_t slot = a.slots[entry];
    if (first < 0 || end < first || end > a.query_tokens) {
      report_fault(faults, PagedFault::rows_not_ascending, 0, 0, a.query_tokens);
      return;
    }
    if (slot < 0 || slot >= a.slot_count) {
      report_fault(faults, PagedFault::slot_out_of_range, slot, 0, a.slot_count);
      return;
    }
    if (first == end) return;
    const int64_t at = int64_t{slot} * a.kv_heads + head;
    const int32_t count = a.key_counts[at];
    if (count < 0 || count > int64_t{a.table_width} * a.block_tokens) {
      report_fault(faults, PagedFault::cache_overflow, slot, 0, a.block_tokens);
      return;
    }
    first_row = first;
    rows = end - first;
    tokens = count;
    cache_head = at;
  }
};

// A number of one of `count` blocks, or -1 and a fault.
__device__ inline int32_t checked_block(int32_t number, int32_t count, FaultSink faults) {
  if (number >= 0 && number < count) return number;
  report_fault(faults, PagedFault::block_out_of_range, number);
  return -1;
}

}  // namespace kv
