#include "kernels/paged-attention.cuda.h"

#include "kernels/cuda-elements.h"

namespace kv {
namespace {

constexpr int kThreads = 128;

struct Check {
  PagedBatch batch;
  bool appending;
  CheckedTables tables;
  FaultSink faults;
};

// What one block, of a batch entry and kv head, writes; an empty table has no rows, and no keys in slot 0.
__device__ void write(const CheckedTables& to, const PagedBatch& b, int entry, int head, bool empty, int32_t count) {
  const int32_t slot = empty ? 0 : b.slots[entry];
  if (!empty || entry == 0) to.key_counts[int64_t{slot} * b.kv_heads + head] = empty ? 0 : count;
  if (head != 0) return;
  to.slots[entry] = slot;
  to.query_start[entry + 1] = empty ? 0 : b.query_start[entry + 1];
  if (entry == 0) to.query_start[0] = empty ? 0 : b.query_start[0];
}

__global__ void __launch_bounds__(kThreads) check(const __grid_constant__ Check c) {
  const PagedBatch& b = c.batch;
  const int entry = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  bool ascends = true;
  bool known = true;
  for (int i = thread; i < b.batch; i += kThreads) {
    const int32_t first = b.query_start[i];
    const int32_t last = b.query_start[i + 1];
    ascends = ascends && first >= 0 && last >= first && last <= b.query_tokens;
    known = known && b.slots[i] >= 0 && b.slots[i] < b.slot_count;
  }
  ascends = __syncthreads_and(ascends);
  known = __syncthreads_and(known);
  int32_t count = 0;
  if (ascends && known) {
    const int64_t cache_head = int64_t{b.slots[entry]} * b.kv_heads + head;
    count = b.key_counts[cache_head];
    const int64_t rows = c.appending ? b.query_start[entry + 1] - b.query_start[entry] : 0;
    const bool fits = count >= 0 && count + rows <= int64_t{b.table_width} * b.block_tokens;
    bool inside = true;
    if (fits) {
      const int64_t blocks = (count + rows + b.block_tokens - 1) / b.block_tokens;
      const int64_t first = c.appending ? count / b.block_tokens : 0;
      for (int64_t i = first + thread; i < blocks; i += kThreads) {
        const int32_t block = b.block_table[cache_head * b.table_width + i];
        if (block >= 0 && block < b.block_count) continue;
        inside = false;
        report_fault(c.faults, FaultCode::block_out_of_range, block);
      }
    } else if (thread == 0) {
      report_fault(c.faults, FaultCode::cache_overflow, b.slots[entry]);
    }
    inside = __syncthreads_and(inside);
    if (!fits || !inside) count = c.appending ? -1 : 0;
  }
  if (thread != 0) return;
  if (!ascends) {
    report_fault(c.faults, FaultCode::rows_not_ascending, 0, 0, b.query_tokens);
  } else if (!known) {
    report_fault(c.faults, FaultCode::slot_out_of_range, b.slots[entry], 0, b.slot_count);
  }
  write(c.tables, b, entry, head, !ascends || !known, count);
}

Status launch(const PagedBatch& b, bool appending, const CheckedTables& tables, ExecutionContext& context) {
  const dim3 blocks(static_cast<unsigned>(b.batch), static_cast<unsigned>(b.kv_heads));
  check<<<blocks, kThreads, 0, stream_of(context)>>>({b, appending, tables, context.faults});
  return launch_status();
}

size_t counts_of(const PagedBatch& b) { return static_cast<size_t>(b.slot_count) * static_cast<size_t>(b.kv_heads); }

}  // namespace

CheckedTables::CheckedTables(const PagedBatch& batch, void* memory)
    : query_start(static_cast<int32_t*>(memory)),
      slots(query_start + batch.batch + 1),
      key_counts(slots + batch.batch) {}

size_t checked_tables_bytes(const PagedBatch& batch) {
  const size_t bytes = (2 * static_cast<size_t>(batch.batch) + 1 + counts_of(batch)) * sizeof(int32_t);
  return (bytes + 255) / 256 * 256;
}

Status check_tables_cuda(const PagedBatch& batch, const CheckedTables& tables, ExecutionContext& context) {
  return launch(batch, false, tables, context);
}

Status check_tables_to_append_cuda(const PagedBatch& batch, const CheckedTables& tables, ExecutionContext& context) {
  return launch(batch, true, tables, context);
}

}  // namespace kv
