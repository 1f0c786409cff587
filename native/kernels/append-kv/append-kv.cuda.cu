#include "kernels/append-kv/append-kv.h"
#include "kernels/cuda-elements.h"
#include "kernels/overlapped-launch.cuda.h"
#include "kernels/paged-attention.cuda.h"
#include "runtime/device.h"

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

// One block appends one token's key and value of one kv head, behind the `count` that are there. The counts that all
// blocks read are copies; the block of an entry's last row writes the new one.
template <class From, class To>
__global__ void append_rows(AppendKvArguments a, int32_t* new_counts) {
  ptx::follow_previous_kernel();
  const int32_t token = static_cast<int32_t>(blockIdx.x);
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  if (token >= a.query_start[a.batch]) return;
  const int32_t entry = entry_of(a, token);
  const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + head;
  const int32_t count = a.key_counts[cache_head];
  if (count < 0) return;
  const int32_t place = count + token - a.query_start[entry];
  if (token == a.query_start[entry + 1] - 1 && threadIdx.x == 0) new_counts[cache_head] = place + 1;
  const int32_t block = a.block_table[cache_head * a.table_width + place / a.block_tokens];
  const int64_t from = token * a.row_token_stride + head * a.row_head_stride;
  const int64_t to = block * a.block_stride + place % a.block_tokens * a.token_stride;
  for (int dim = static_cast<int>(threadIdx.x); dim < a.head_dim; dim += static_cast<int>(blockDim.x)) {
    static_cast<To*>(a.key_pool)[to + dim] = from_float<To>(to_float(static_cast<const From*>(a.keys)[from + dim]));
    static_cast<To*>(a.value_pool)[to + dim] = from_float<To>(to_float(static_cast<const From*>(a.values)[from + dim]));
  }
}

}  // namespace

Status append_kv_cuda(const AppendKvArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  void* memory = context.queue->workspace(checked_tables_bytes(given));
  if (memory == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for its working memory");
  const CheckedTables tables(given, memory);
  Status status = check_tables_to_append_cuda(given, tables, context);
  if (!status.ok()) return status;
  const AppendKvArguments a = with_tables(given, tables);
  const dim3 rows(static_cast<unsigned>(a.query_tokens), static_cast<unsigned>(a.kv_heads));
  const unsigned threads = a.head_dim > 64 ? 128 : 64;
  with_cuda_float_type(a.row_dtype, [&](auto row) {
    with_cuda_float_type(a.cache_dtype, [&](auto cached) {
      const auto kernel = append_rows<decltype(row), decltype(cached)>;
      status = launch_overlapped(kernel, rows, threads, 0, stream_of(context), a, given.key_counts);
    });
  });
  return status;
}

}  // namespace kv
