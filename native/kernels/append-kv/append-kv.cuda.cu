#include "kernels/append-kv/append-kv.h"
#include "runtime/device.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/check-tables.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlockRows = 16;

// Checks this thread's share of the batch, and whether the rows of one entry have room. Reports what is wrong. False
// for an entry without rows, which has nothing to write.
__device__ bool looks_sound(const AppendKvArguments& a, int entry, int64_t cache_head, FaultSink faults) {
  for (int i = static_cast<int>(threadIdx.x); i < a.batch; i += kThreads) {
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
  for (int64_t i = count / a.block_tokens + threadIdx.x; i * a.block_tokens < end; i += kThreads) {
    if (table[i] >= 0 && table[i] < a.block_count) continue;
    report_fault(faults, PagedFault::block_out_of_range, table[i]);
    return false;
  }
  return true;
}

// A warp copies a row of keys and one of values. It reads several elements before it writes any, so that it waits for
// memory once.
template <class From, class To>
__device__ void copy_row(const AppendKvArguments& a, int64_t from, int64_t to) {
  constexpr int kAtOnce = 4;
  const From* keys = static_cast<const From*>(a.keys) + from;
  const From* values = static_cast<const From*>(a.values) + from;
  for (int first = static_cast<int>(threadIdx.x) % kWarp; first < a.head_dim; first += kAtOnce * kWarp) {
    From key[kAtOnce];
    From value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int dim = first + i * kWarp;
      if (dim >= a.head_dim) continue;
      key[i] = keys[dim];
      value[i] = values[dim];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int dim = first + i * kWarp;
      if (dim >= a.head_dim) continue;
      static_cast<To*>(a.key_pool)[to + dim] = from_float<To>(to_float(key[i]));
      static_cast<To*>(a.value_pool)[to + dim] = from_float<To>(to_float(value[i]));
    }
  }
}

// One thread block appends some rows of one batch entry and kv head. Each thread block checks whether the whole entry
// has room. The last one that arrives counts the entry's rows. `arrivals`, [batch, kv_head], is 0 before and after.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    append_rows(const __grid_constant__ AppendKvArguments a, unsigned* arrivals, FaultSink faults) {
  ptx::follow_previous_kernel();
  const int head = static_cast<int>(blockIdx.y);
  const int entry = static_cast<int>(blockIdx.z);
  const int32_t first = a.query_start[entry];
  const int32_t rows = a.query_start[entry + 1] - first;
  const int32_t begin = static_cast<int32_t>(blockIdx.x) * kBlockRows;
  if (begin > 0 && begin >= rows) return;  // the other thread blocks may have counted the rows by now
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  if (!__syncthreads_and(looks_sound(a, entry, cache_head, faults))) return;
  const int32_t count = a.key_counts[cache_head];
  const auto blocks = static_cast<int32_t>(gridDim.x);
  for (int32_t some = begin; some < rows; some += blocks * kBlockRows) {
    const int32_t end = min(some + kBlockRows, rows);
    for (int32_t row = some + static_cast<int>(threadIdx.x) / kWarp; row < end; row += kWarps) {
      const int32_t place = count + row;
      const int64_t block = a.block_table[cache_head * a.table_width + place / a.block_tokens];
      const int64_t from = (first + row) * a.row_token_stride + head * a.row_head_stride;
      const int64_t to = block * a.block_stride + place % a.block_tokens * a.token_stride;
      copy_row<From, To>(a, from, to);
    }
  }
  __syncthreads();  // after this, all threads have read the count
  if (threadIdx.x != 0) return;
  const int32_t appending = min((rows + kBlockRows - 1) / kBlockRows, blocks);
  if (appending > 1) {
    unsigned& arrived = arrivals[entry * a.kv_heads + head];
    if (atomicAdd(&arrived, 1u) + 1 < static_cast<unsigned>(appending)) return;
    arrived = 0;
  }
  a.key_counts[cache_head] = count + rows;
}

}  // namespace

Status append_kv_cuda(const AppendKvArguments& a, ExecutionContext& context) {
  if (a.batch == 0 || a.query_tokens == 0) return Status::success();
  const size_t entries = static_cast<size_t>(a.batch) * static_cast<size_t>(a.kv_heads);
  auto* arrivals = static_cast<unsigned*>(context.queue->zeroed_workspace(entries * sizeof(unsigned)));
  if (arrivals == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for its counters");
  // Only the device knows how many rows each entry has, so every entry gets as many thread blocks as all rows need.
  // With no more rows than entries, entries of many rows are rare, and one thread block appends all of them.
  const int32_t most_rows = a.query_tokens <= a.batch ? 1 : a.query_tokens;
  const dim3 blocks(static_cast<unsigned>((most_rows + kBlockRows - 1) / kBlockRows),
                    static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch));
  Status status;
  with_cuda_float_type(a.row_dtype, [&](auto row) {
    with_cuda_float_type(a.cache_dtype, [&](auto cached) {
      const auto kernel = append_rows<decltype(row), decltype(cached)>;
      status = launch_overlapped(kernel, blocks, kThreads, 0, stream_of(context), a, arrivals,
                                 context.faults(describe_append_kv_fault));
    });
  });
  return status;
}

}  // namespace kv
