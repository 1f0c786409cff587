#include "kernels/embedding/embedding.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

__device__ int64_t requested_row(const EmbeddingArguments& a, int64_t token) {
  return a.id_dtype == DType::u32 ? static_cast<int64_t>(static_cast<const uint32_t*>(a.ids)[token])
                                  : static_cast<int64_t>(static_cast<const int32_t*>(a.ids)[token]);
}

// Every thread block checks all ids: if one is wrong, nothing may be written.
__device__ bool all_inside(const EmbeddingArguments& a, bool reports, FaultSink faults) {
  bool inside = true;
  for (int64_t i = threadIdx.x; i < a.tokens; i += blockDim.x) {
    const int64_t row = requested_row(a, i);
    if (row >= 0 && row < a.rows) continue;
    inside = false;
    if (reports) report_fault(faults, EmbeddingFault::id_out_of_range, row, i, a.rows);
  }
  return __syncthreads_and(inside);
}

template <class From, class To>
__global__ void copy_rows(EmbeddingArguments a, FaultSink faults) {
  ptx::follow_previous_kernel();
  const int64_t token = blockIdx.x;
  To* to = static_cast<To*>(a.output) + token * a.output_stride;
  const int64_t row = requested_row(a, token);
  if (a.nan_outside) {
    if (row < 0 || row >= a.rows) {
      for (int64_t i = threadIdx.x; i < a.features; i += blockDim.x) to[i] = from_float<To>(NAN);
      return;
    }
  } else if (!all_inside(a, token == 0, faults)) {
    return;
  }
  const From* from = static_cast<const From*>(a.table) + row * a.table_stride;
  for (int64_t i = threadIdx.x; i < a.features; i += blockDim.x) to[i] = from_float<To>(to_float(from[i]));
}

}  // namespace

Status embedding_cuda(const EmbeddingArguments& a, ExecutionContext& context) {
  if (a.tokens == 0) return Status::success();
  const auto tokens = static_cast<unsigned>(a.tokens);
  const unsigned threads = a.features > 1024 ? 1024 : 256;  // a thread's few reads wait for memory together
  Status status;
  with_cuda_float_type(a.table_dtype, [&](auto from) {
    with_cuda_float_type(a.output_dtype, [&](auto to) {
      status = launch_overlapped(copy_rows<decltype(from), decltype(to)>, tokens, threads, 0, stream_of(context), a,
                                 context.faults(describe_embedding_fault));
    });
  });
  return status;
}

}  // namespace kv
