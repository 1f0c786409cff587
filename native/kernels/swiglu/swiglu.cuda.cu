#include "kernels/swiglu/swiglu.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/cuda/silu.cuda.h"

namespace kv {
namespace {

// Neighbours that a thread computes at once where tokens are many: 16 bytes of a 16-bit type. Of few tokens, more threads
// are sooner done.
constexpr int kPack = 8;
constexpr int kManyTokens = 64;

template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T element[kCount];
};

// Each thread block computes every gridDim-th token.
template <class T, int kCount>
__global__ void gate_rows(SwigluArguments a) {
  ptx::follow_previous_kernel();
  using Values = Pack<T, kCount>;
  const int64_t feature = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kCount;
  if (feature >= a.features) return;
  for (int64_t token = blockIdx.y; token < a.tokens; token += gridDim.y) {
    const auto gates = *reinterpret_cast<const Values*>(static_cast<const T*>(a.gate) + token * a.gate_stride + feature);
    const auto ups = *reinterpret_cast<const Values*>(static_cast<const T*>(a.up) + token * a.up_stride + feature);
    Values outputs;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      outputs.element[i] = from_float<T>(silu(to_float(gates.element[i])) * to_float(ups.element[i]));
    }
    *reinterpret_cast<Values*>(static_cast<T*>(a.output) + token * a.output_stride + feature) = outputs;
  }
}

bool fits_packs(const SwigluArguments& a) {
  for (const int64_t extent : {a.features, a.gate_stride, a.up_stride, a.output_stride}) {
    if (extent % kPack != 0) return false;
  }
  for (const void* data : {a.gate, a.up, static_cast<const void*>(a.output)}) {
    if (reinterpret_cast<uintptr_t>(data) % (kPack * byte_size(a.dtype)) != 0) return false;
  }
  return true;
}

template <class T, int kCount>
Status launch(const SwigluArguments& a, cudaStream_t stream) {
  constexpr unsigned kThreads = 256;
  const dim3 blocks(static_cast<unsigned>((a.features + kThreads * kCount - 1) / (kThreads * kCount)),
                    static_cast<unsigned>(a.tokens < 4096 ? a.tokens : 4096));
  return launch_overlapped(gate_rows<T, kCount>, blocks, kThreads, 0, stream, a);
}

}  // namespace

Status swiglu_cuda(const SwigluArguments& a, ExecutionContext& context) {
  if (a.tokens == 0 || a.features == 0) return Status::success();
  Status status;
  with_cuda_float_type(a.dtype, [&](auto element) {
    using T = decltype(element);
    status = a.tokens >= kManyTokens && fits_packs(a) ? launch<T, kPack>(a, stream_of(context))
                                                      : launch<T, 1>(a, stream_of(context));
  });
  return status;
}

}  // namespace kv
