#include "kernels/decode-keys/decode-keys.h"
#include "shared/coded-keys/coded-keys.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

// One thread block writes one block of keys. Neighbouring threads write neighbouring dims.
template <class T>
__global__ void __launch_bounds__(kThreads) decode_blocks(const __grid_constant__ DecodeKeysArguments a) {
  const uint32_t* codes = a.block(a.from[blockIdx.x]);
  const uint32_t* spoilt = a.spoilt(a.from[blockIdx.x]);
  T* dense = static_cast<T*>(a.keys) + a.to[blockIdx.x] * a.block_stride;
  const int head = a.heads[blockIdx.x];
  const float* scales = a.channel_scale == nullptr ? nullptr : a.channel_scale + int64_t{head} * a.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < kCodedBlockTokens * a.head_dim; i += kThreads) {
    const int token = i / a.head_dim;
    const int dim = i % a.head_dim;
    const int group = dim / a.sub_dim;
    const int64_t centroid = code_at(a, codes, token, group);
    const float element = half_value(a.centroids[a.book_offset(head, group) + centroid * a.sub_dim + dim % a.sub_dim]);
    const float x = scales == nullptr ? element : __fmul_rn(element, scales[dim]);
    dense[token * a.token_stride + dim] = from_float<T>((spoilt[token / 32] >> token % 32 & 1) != 0 ? NAN : x);
  }
}

}  // namespace

Status decode_keys_cuda(const DecodeKeysArguments& a, ExecutionContext& context) {
  with_cuda_float_type(a.dtype, [&](auto element) {
    decode_blocks<decltype(element)><<<static_cast<unsigned>(a.copies), kThreads, 0, stream_of(context)>>>(a);
  });
  return launch_status();
}

}  // namespace kv
