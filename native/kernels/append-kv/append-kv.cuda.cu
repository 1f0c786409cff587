#include "kernels/append-kv/append-kv.h"
#include "kernels/cuda-elements.h"

namespace kv {
namespace {

// Which batch entry row `token` belongs to.
__device__ int32_t entry_of(const AppendKvArguments& a, int32_t token) {
  int32_t low = 0;
  int32_t high = a.batch;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (a.query_start[middle] <= token ? low : high) = middle;
  }
  return low;
}

// One block appends one token's key and value of one kv head.
template <class From, class To>
__global__ void append_rows(AppendKvArguments a, Fault* fault) {
  const int32_t token = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  if (token >= a.query_start[a.batch]) return;
  const int32_t entry = entry_of(a, token);
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  const int32_t place = a.key_counts[cache_head] + token - a.query_start[entry];
  if (place / a.block_tokens >= a.table_width) {
    if (threadIdx.x == 0) report_fault(fault, FaultCode::cache_overflow, a.slots[entry]);
    return;
  }
  const int32_t block = a.block_table[cache_head * a.table_width + place / a.block_tokens];
  if (block < 0 || block >= a.block_count) {
    if (threadIdx.x == 0) report_fault(fault, FaultCode::block_out_of_range, block);
    return;
  }
  const int64_t from = token * a.row_token_stride + head * a.row_head_stride;
  const int64_t to = block * a.block_stride + place % a.block_tokens * a.token_stride;
  for (int dim = static_cast<int>(threadIdx.x); dim < a.head_dim; dim += static_cast<int>(blockDim.x)) {
    static_cast<To*>(a.key_pool)[to + dim] = from_float<To>(to_float(static_cast<const From*>(a.keys)[from + dim]));
    static_cast<To*>(a.value_pool)[to + dim] = from_float<To>(to_float(static_cast<const From*>(a.values)[from + dim]));
  }
}

__global__ void count_rows(AppendKvArguments a) {
  for (int32_t item = static_cast<int32_t>(threadIdx.x); item < a.batch * a.kv_heads;
       item += static_cast<int32_t>(blockDim.x)) {
    const int32_t entry = item / a.kv_heads;
    int32_t& count = a.key_counts[int64_t{a.slots[entry]} * a.kv_heads + item % a.kv_heads];
    const int32_t grown = count + a.query_start[entry + 1] - a.query_start[entry];
    if (grown <= a.table_width * a.block_tokens) count = grown;
  }
}

}  // namespace

Status append_kv_cuda(const AppendKvArguments& a, ExecutionContext& context) {
  if (a.batch == 0 || a.query_tokens == 0) return Status::success();
  const dim3 rows(static_cast<unsigned>(a.query_tokens), static_cast<unsigned>(a.kv_heads));
  const unsigned threads = a.head_dim > 64 ? 128 : 64;
  with_cuda_float_type(a.row_dtype, [&](auto row) {
    with_cuda_float_type(a.cache_dtype, [&](auto cached) {
      append_rows<decltype(row), decltype(cached)><<<rows, threads, 0, stream_of(context)>>>(a, context.fault);
    });
  });
  count_rows<<<1, 256, 0, stream_of(context)>>>(a);
  return launch_status();
}

}  // namespace kv
