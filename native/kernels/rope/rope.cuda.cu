#include "kernels/rope/rope-pair.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

// One thread block rotates one token, or some heads of one token. A thread keeps the cosine and sine of its pair for
// all these heads.
template <class T>
__global__ void rotate_tokens(RopeArguments a) {
  ptx::follow_previous_kernel();
  const int64_t token = blockIdx.x;
  const T* input = static_cast<const T*>(a.input) + token * a.input_token_stride;
  T* output = static_cast<T*>(a.output) + token * a.output_token_stride;
  const int64_t pair = threadIdx.x;
  const int64_t first_head = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  const int64_t heads = int64_t{gridDim.y} * blockDim.y;
  if (pair < a.pairs) {
    const Turn turn = turn_of(a, token, pair);
    for (int64_t head = first_head; head < a.heads; head += heads) {
      const T* from = input + head * a.input_head_stride;
      T* to = output + head * a.output_head_stride;
      const Pair<T> after = turned(Pair<T>{from[first_of(a, pair)], from[second_of(a, pair)]}, turn);
      to[first_of(a, pair)] = after.first;
      to[second_of(a, pair)] = after.second;
    }
  }
  for (int64_t head = first_head; head < a.heads; head += heads) {
    for (int64_t dim = 2 * a.pairs + threadIdx.x; dim < a.head_dim; dim += blockDim.x) {
      output[head * a.output_head_stride + dim] = input[head * a.input_head_stride + dim];
    }
  }
}

}  // namespace

Status rope_cuda(const RopeArguments& a, ExecutionContext& context) {
  if (a.tokens == 0 || a.heads == 0) return Status::success();
  if (a.pairs > 1024) return Status::failure(StatusCode::capability, "rope on CUDA turns at most 1024 pairs of a head");
  const unsigned pairs = static_cast<unsigned>(a.pairs < kWarp ? kWarp : a.pairs);
  const dim3 threads(pairs, pairs > 512 ? 1 : 512 / pairs);
  // Few tokens leave the device idle, so more thread blocks share their heads.
  const auto groups = static_cast<unsigned>((a.heads + threads.y - 1) / threads.y);
  const dim3 blocks(static_cast<unsigned>(a.tokens), a.tokens < 64 ? groups : 1);
  Status status;
  with_cuda_float_type(a.dtype, [&](auto element) {
    status = launch_overlapped(rotate_tokens<decltype(element)>, blocks, threads, 0, stream_of(context), a);
  });
  return status;
}

}  // namespace kv
