#include "kernels/rms-norm/rms-norm.h"
#include "ptx/async-copy.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

// One thread block normalises one row.
template <class T, class W>
__global__ void normalise_rows(RmsNormArguments a) {
  ptx::follow_previous_kernel();
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

constexpr int kPack = 8;

template <class T>
struct alignas(16) Pack {
  T element[kPack];
};

// The same for rows of which each thread holds one pack of elements. They are read once, 16 bytes at a time.
template <class T, class W>
__global__ void normalise_packed_rows(RmsNormArguments a) {
  ptx::let_next_kernel_start();
  const int64_t outer = blockIdx.x;
  const int64_t inner = blockIdx.y;
  const int64_t first = int64_t{threadIdx.x} * kPack;
  const bool inside = first < a.features;
  // A step's other layers have pushed the weights out of L2.
  if (outer == 0 && inside) ptx::prefetch_line_to_l2(static_cast<const W*>(a.weight) + first);
  ptx::wait_for_previous_kernel();
  const T* input = static_cast<const T*>(a.input) + outer * a.input_outer_stride + inner * a.input_inner_stride;
  T* output = static_cast<T*>(a.output) + outer * a.output_outer_stride + inner * a.output_inner_stride;
  Pack<T> row{};
  Pack<W> weight{};
  if (inside) {
    row = *reinterpret_cast<const Pack<T>*>(input + first);
    weight = *reinterpret_cast<const Pack<W>*>(static_cast<const W*>(a.weight) + first);
  }
  float square = 0;
#pragma unroll
  for (const T x : row.element) square += to_float(x) * to_float(x);
  const float scale = rsqrtf(block_sum(square) / static_cast<float>(a.features) + a.epsilon);
  if (!inside) return;
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    row.element[i] = from_float<T>(to_float(row.element[i]) * scale * to_float(weight.element[i]));
  }
  *reinterpret_cast<Pack<T>*>(output + first) = row;
}

bool fits_packs(const RmsNormArguments& a) {
  for (const int64_t extent : {a.features, a.input_outer_stride, a.input_inner_stride, a.output_outer_stride,
                               a.output_inner_stride}) {
    if (extent % kPack != 0) return false;
  }
  for (const void* data : {a.input, a.weight, static_cast<const void*>(a.output)}) {
    if (reinterpret_cast<uintptr_t>(data) % sizeof(float4) != 0) return false;
  }
  return a.features > 0 && a.features <= 1024 * kPack;
}

}  // namespace

Status rms_norm_cuda(const RmsNormArguments& a, ExecutionContext& context) {
  if (a.outer == 0 || a.inner == 0) return Status::success();
  const dim3 rows(static_cast<unsigned>(a.outer), static_cast<unsigned>(a.inner));
  const bool packed = fits_packs(a);
  const auto warps_of_packs = static_cast<unsigned>((a.features + kWarp * kPack - 1) / (kWarp * kPack));
  const unsigned threads = packed ? kWarp * warps_of_packs : a.features > 2048 ? 512 : a.features > 256 ? 256 : 64;
  Status status;
  with_cuda_float_type(a.dtype, [&](auto element) {
    with_cuda_float_type(a.weight_dtype, [&](auto weight) {
      const auto kernel = packed ? normalise_packed_rows<decltype(element), decltype(weight)>
                                 : normalise_rows<decltype(element), decltype(weight)>;
      status = launch_overlapped(kernel, rows, threads, 0, stream_of(context), a);
    });
  });
  return status;
}

}  // namespace kv
