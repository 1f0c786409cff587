#include "kernels/cross-entropy/cross-entropy.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

__device__ float block_maximum(float x) {
  __shared__ float partial[kThreads / kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  if (lane == 0) partial[threadIdx.x / kWarp] = x;
  __syncthreads();
  float result = partial[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) result = fmaxf(result, partial[warp]);
  return result;
}

// One thread block computes one row.
__global__ void __launch_bounds__(kThreads) measure_rows(CrossEntropyArguments a) {
  const float* logits = a.logits + int64_t{blockIdx.x} * a.row_stride;
  float greatest = -INFINITY;
  for (int64_t i = threadIdx.x; i < a.vocabulary; i += kThreads) greatest = fmaxf(greatest, logits[i]);
  greatest = block_maximum(greatest);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < a.vocabulary; i += kThreads) sum += expf(logits[i] - greatest);
  sum = block_sum(sum);
  if (threadIdx.x == 0) a.output[blockIdx.x] = greatest + logf(sum) - logits[a.targets[blockIdx.x]];
}

}  // namespace

Status cross_entropy_cuda(const CrossEntropyArguments& a, ExecutionContext& context) {
  if (a.rows == 0) return Status::success();
  measure_rows<<<static_cast<unsigned>(a.rows), kThreads, 0, stream_of(context)>>>(a);
  return launch_status();
}

}  // namespace kv
