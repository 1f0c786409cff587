#include "kernels/running-means/running-means.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 128;

// One thread block sums all blocks that go on from its first one. A thread has every 128th dim. The sums stay in registers
// from block to block, for they are usually stored in host memory.
template <class T>
__global__ void __launch_bounds__(kThreads) add_blocks(const __grid_constant__ RunningMeansArguments a) {
  const auto first = static_cast<int32_t>(blockIdx.x);
  if (a.goes_on(first)) return;
  for (int dim = static_cast<int>(threadIdx.x); dim < a.head_dim; dim += kThreads) {
    const int64_t before = a.before[first];
    float sum = before < 0 ? 0.0f : a.sums[before * a.head_dim + dim];
    for (int32_t i = first; i < a.length && (i == first || a.goes_on(i)); ++i) {
      const T* values = static_cast<const T*>(a.values) + a.from[i] * a.block_stride + dim;
#pragma unroll 16
      for (int token = 0; token < kSummedBlockTokens; ++token) sum = __fadd_rn(sum, to_float(values[token * a.token_stride]));
      const int64_t place = int64_t{a.to[i]} * a.head_dim + dim;
      const float tokens = static_cast<float>(kSummedBlockTokens) * static_cast<float>(a.counts[i]);
      a.sums[place] = sum;
      static_cast<T*>(a.means)[place] = from_float<T>(__fdiv_rn(sum, tokens));
    }
  }
}

}  // namespace

Status running_means_cuda(const RunningMeansArguments& a, ExecutionContext& context) {
  with_cuda_float_type(a.dtype, [&](auto element) {
    add_blocks<decltype(element)><<<static_cast<unsigned>(a.length), kThreads, 0, stream_of(context)>>>(a);
  });
  return launch_status();
}

}  // namespace kv
