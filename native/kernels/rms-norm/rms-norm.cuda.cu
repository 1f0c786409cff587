#include "kernels/cuda-elements.h"
#include "kernels/rms-norm/rms-norm.h"

namespace kv {
namespace {

// One block normalises one row.
template <class T, class W>
__global__ void normalise_rows(RmsNormArguments a) {
  const int64_t outer = blockIdx.x;
  const int64_t inner = blockIdx.y;
  const T* input = static_cast<const T*>(a.input) + outer * a.input_outer_stride + inner * a.input_inner_stride;
  T* output = static_cast<T*>(a.output) + outer * a.output_outer_stride + inner * a.output_inner_stride;
  const W* weight = static_cast<const W*>(a.weight);
  float square = 0;
  for (int64_t i = threadIdx.x; i < a.features; i += blockDim.x) square += to_float(input[i]) * to_float(input[i]);
  const float scale = rsqrtf(block_sum(square) / static_cast<float>(a.features) + a.epsilon);
  for (int64_t i = threadIdx.x; i < a.features; i += blockDim.x) {
    output[i] = from_float<T>(to_float(input[i]) * scale * to_float(weight[i]));
  }
}

}  // namespace

Status rms_norm_cuda(const RmsNormArguments& a, ExecutionContext& context) {
  if (a.outer == 0 || a.inner == 0) return Status::success();
  const dim3 rows(static_cast<unsigned>(a.outer), static_cast<unsigned>(a.inner));
  const unsigned threads = a.features > 2048 ? 512 : a.features > 256 ? 256 : 64;
  with_cuda_float_type(a.dtype, [&](auto element) {
    with_cuda_float_type(a.weight_dtype, [&](auto weight) {
      normalise_rows<decltype(element), decltype(weight)><<<rows, threads, 0, stream_of(context)>>>(a);
    });
  });
  return launch_status();
}

}  // namespace kv
