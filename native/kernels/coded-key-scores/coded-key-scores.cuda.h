// Launchers of scores from codes on CUDA devices. They enqueue on `stream` and return. Faults of the tables are reported
// through `faults`, and nothing is read there.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/coded-key-scores/coded-key-scores.h"
#include "runtime/fault.h"
#include "shared/paged/paged-faults.h"

namespace kv::cuda {

// Queries of 16 bits and 64 or 128 dims, one book of all groups with sub-vectors of 2 or 4 dims, codes of 8, 12, 13 or 16
// bits. Rows of scores, and books, begin at multiples of 16 bytes.
bool fits_coded_key_scores(const CodedKeyScoresArguments& arguments);

// Takes what fits_coded_key_scores accepts.
Status coded_key_scores(const CodedKeyScoresArguments& arguments, FaultSink faults, cudaStream_t stream);

// Takes everything.
Status coded_key_scores_any(const CodedKeyScoresArguments& arguments, FaultSink faults, cudaStream_t stream);

#ifdef __CUDACC__
// The rows and the coded blocks of one kv head of a batch entry.
struct EntryHead {
  int64_t first_row = 0;
  int columns = 0;  // rows times query heads of the kv head
  const int32_t* table = nullptr;
  int blocks = 0;

  // No columns, and a fault, if the batch's numbers are out of range.
  __device__ EntryHead(const CodedKeyScoresArguments& a, int entry, int head, FaultSink faults) {
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
    if (count < 0 || count % kCodedBlockTokens != 0 || count > int64_t{a.table_width} * kCodedBlockTokens) {
      const bool part = count % kCodedBlockTokens != 0;
      report_fault(faults, part ? PagedFault::part_of_block : PagedFault::cache_overflow, slot, 0, kCodedBlockTokens);
      return;
    }
    first_row = first;
    columns = (end - first) * (a.query_heads / a.kv_heads);
    table = a.block_table + cache_head * a.table_width;
    blocks = count / kCodedBlockTokens;
  }

  // The number of a coded block, or -1 and a fault.
  __device__ int32_t block(int index, int32_t block_count, FaultSink faults) const {
    const int32_t number = table[index];
    if (number >= 0 && number < block_count) return number;
    report_fault(faults, PagedFault::block_out_of_range, number);
    return -1;
  }
};
#endif

}  // namespace kv::cuda
