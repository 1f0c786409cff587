#include "shared/paged/paged-attention.cuda.h"

#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/check-tables.cuda.h"

namespace kv {
namespace {

// A pool of blocks, and the table that names its blocks.
struct PagedTable {
  const int32_t* entries;
  int32_t block_count;

  __device__ bool check(int64_t entry, bool, FaultSink faults) const {
    const int32_t block = entries[entry];
    if (block >= 0 && block < block_count) return true;
    report_fault(faults, PagedFault::block_out_of_range, block);
    return false;
  }
};

// A table that is refused is replaced by an empty one with slot 0, even if there are no slots.
size_t counts_of(const PagedBatch& b) {
  const int64_t slots = b.slot_count > 0 ? b.slot_count : 1;
  return static_cast<size_t>(slots) * static_cast<size_t>(b.kv_heads);
}

}  // namespace

CheckedTables::CheckedTables(const PagedBatch& batch, void* memory)
    : query_start(static_cast<int32_t*>(memory)),
      slots(query_start + batch.batch + 1),
      key_counts(slots + batch.batch) {}

size_t checked_tables_bytes(const PagedBatch& batch) {
  const size_t bytes = (2 * static_cast<size_t>(batch.batch) + 1 + counts_of(batch)) * sizeof(int32_t);
  return (bytes + 255) / 256 * 256;
}

Status check_tables_cuda(const PagedBatch& b, const CheckedTables& tables, ExecutionContext& context,
                         bool looks_without_rows, bool whole_blocks) {
  const dim3 blocks(static_cast<unsigned>(b.batch), static_cast<unsigned>(b.kv_heads));
  const PagedTable table{b.block_table, b.block_count};
  const TableCheck check{b, tables, context.faults(describe_paged_fault), looks_without_rows, whole_blocks};
  return launch_overlapped(check_tables<PagedTable>, blocks, kCheckThreads, 0, stream_of(context), check, table);
}

}  // namespace kv
