#include "kernels/swiglu/swiglu.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

// Each thread block computes every gridDim-th token.
template <class T>
__global__ void gate_rows(SwigluArguments a) {
  ptx::follow_previous_kernel();
  const int64_t feature = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (feature >= a.features) return;
  for (int64_t token = blockIdx.y; token < a.tokens; token += gridDim.y) {
    const float gate = to_float(static_cast<const T*>(a.gate)[token * a.gate_stride + feature]);
    const float up = to_float(static_cast<const T*>(a.up)[token * a.up_stride + feature]);
    static_cast<T*>(a.output)[token * a.output_stride + feature] = from_float<T>(gate / (1.0f + expf(-gate)) * up);
  }
}

}  // namespace

Status swiglu_cuda(const SwigluArguments& a, ExecutionContext& context) {
  if (a.tokens == 0 || a.features == 0) return Status::success();
  constexpr unsigned kThreads = 256;
  const dim3 blocks(static_cast<unsigned>((a.features + kThreads - 1) / kThreads),
                    static_cast<unsigned>(a.tokens < 4096 ? a.tokens : 4096));
  Status status;
  with_cuda_float_type(a.dtype, [&](auto element) {
    status = launch_overlapped(gate_rows<decltype(element)>, blocks, kThreads, 0, stream_of(context), a);
  });
  return status;
}

}  // namespace kv
