#include <cmath>

#include "kernels/merge-attention/merge-attention.h"
#include "shared/attention/part-weights.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

// A thread block merges a row of one head, and then others.
template <class T, class Other>
__global__ void merge_rows(MergeAttentionArguments a) {
  ptx::follow_previous_kernel();
  const int64_t rows = a.tokens * a.query_heads;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float own = a.log_sum_exp[row];
    const float other = a.other_log_sum_exp[row];
    // All threads have read them before one writes.
    __syncthreads();
    if (other == -INFINITY) continue;
    const PartWeights weights = part_weights(own, other);
    const int64_t token = row / a.query_heads;
    const int64_t head = row % a.query_heads;
    T* output = static_cast<T*>(a.output) + token * a.output_token_stride + head * a.output_head_stride;
    const Other* from = static_cast<const Other*>(a.other) + token * a.other_token_stride + head * a.other_head_stride;
    for (int64_t dim = threadIdx.x; dim < a.head_dim; dim += blockDim.x) {
      output[dim] = from_float<T>(to_float(output[dim]) * weights.own + to_float(from[dim]) * weights.other);
    }
    if (threadIdx.x == 0) a.log_sum_exp[row] = weights.log_sum_exp;
  }
}

}  // namespace

Status merge_attention_cuda(const MergeAttentionArguments& a, ExecutionContext& context) {
  const int64_t rows = a.tokens * a.query_heads;
  if (rows == 0 || a.head_dim == 0) return Status::success();
  const unsigned threads = a.head_dim <= 64 ? 64 : 128;
  const unsigned blocks = static_cast<unsigned>(rows < 65536 ? rows : 65536);
  Status status;
  with_cuda_float_type(a.dtype, [&](auto element) {
    with_cuda_float_type(a.other_dtype, [&](auto other) {
      status = launch_overlapped(merge_rows<decltype(element), decltype(other)>, dim3(blocks), threads, 0, stream_of(context), a);
    });
  });
  return status;
}

}  // namespace kv
