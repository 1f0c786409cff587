#include "kernels/append-kv/append-kv-rope.cuda.h"
#include "kernels/append-kv/append-kv-tables.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlockRows = 16;

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
  ptx::let_next_kernel_start();
  const int head = static_cast<int>(blockIdx.y);
  const int entry = static_cast<int>(blockIdx.z);
  const TablesAhead ahead = prefetch_tables(a, entry, head);
  ptx::wait_for_previous_kernel();
  fetch_tables(ahead);
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
  if (fits_append_kv_rope(a)) return append_kv_rope(a, context);
  const Status turned = a.turns ? turn_rows(a, context) : Status::success();
  if (!turned.ok()) return turned;
  const size_t entries = static_cast<size_t>(a.batch) * static_cast<size_t>(a.kv_heads);
  auto* arrivals = static_cast<unsigned*>(context.zeroed_workspace(entries * sizeof(unsigned)));
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
