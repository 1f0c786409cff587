// What a CUDA kernel that computes scores reads of the batch. Device code.
#pragma once

#include "shared/key-scores/key-scores.h"
#include "shared/paged/entry-blocks.cuda.h"

namespace kv::cuda {

// The rows and the coded blocks of one kv head of a batch entry.
struct EntryHead {
  static constexpr int kBlockTokens = 64;

  int64_t first_row = 0;
  int columns = 0;  // rows times query heads of the kv head
  const int32_t* table = nullptr;
  int blocks = 0;

  // No columns, and a fault, if the batch's numbers are out of range.
  __device__ EntryHead(const KeyScoresArguments& a, int entry, int head, FaultSink faults) {
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
    const int64_t cache_head = int64_t{slot} * a.kv_heads + head;
    const int32_t count = a.key_counts[cache_head];
    if (count < 0 || count % kBlockTokens != 0 || count > int64_t{a.table_width} * kBlockTokens) {
      const bool part = count % kBlockTokens != 0;
      report_fault(faults, part ? PagedFault::part_of_block : PagedFault::cache_overflow, slot, 0, kBlockTokens);
      return;
    }
    first_row = first;
    columns = (end - first) * (a.query_heads / a.kv_heads);
    table = a.block_table + cache_head * a.table_width;
    blocks = count / kBlockTokens;
  }

  // The number of a coded block, or -1 and a fault.
  __device__ int32_t block(int index, int32_t block_count, FaultSink faults) const {
    return checked_block(table[index], block_count, faults);
  }
};

}  // namespace kv::cuda
