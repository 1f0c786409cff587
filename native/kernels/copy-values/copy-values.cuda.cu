#include "kernels/copy-values/copy-values.h"

#define KV_ISA cuda
#include "kernels/copy-values/copy-values-code.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

__device__ float scale_of(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }

// One thread block copies one block, and a thread one `Unit` at a time.
template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_blocks(const __grid_constant__ CopyValuesArguments a, int element_bytes) {
  const int row_units = a.head_dim * element_bytes / static_cast<int>(sizeof(Unit));
  const char* from = static_cast<const char*>(a.values) + a.from[blockIdx.x] * a.block_stride * element_bytes;
  Unit* to = static_cast<Unit*>(a.pool) + int64_t{a.to[blockIdx.x]} * kCopiedBlockTokens * row_units;
  for (int i = static_cast<int>(threadIdx.x); i < kCopiedBlockTokens * row_units; i += kThreads) {
    const int token = i / row_units;
    to[i] = reinterpret_cast<const Unit*>(from + token * a.token_stride * element_bytes)[i % row_units];
  }
}

// One thread block writes the codes of one block, and a warp those of a token. A lane has four dims that follow each other,
// so that what a warp writes over the link is as long as it can be.
template <class T>
__global__ void __launch_bounds__(kThreads) write_codes(const __grid_constant__ CopyValuesArguments a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* block = static_cast<const T*>(a.values) + a.from[blockIdx.x] * a.block_stride;
  for (int token = static_cast<int>(threadIdx.x) / kWarp; token < kCopiedBlockTokens; token += kWarps) {
    const T* values = block + token * a.token_stride;
    const int64_t row = int64_t{a.to[blockIdx.x]} * kCopiedBlockTokens + token;
    int8_t* codes = static_cast<int8_t*>(a.pool) + row * a.head_dim;
    uint32_t largest = 0;
    for (int dim = lane; dim < a.head_dim; dim += kWarp) {
      largest = max(largest, __float_as_uint(to_float(values[dim])) & 0x7fffffffu);
    }
    const float step = __fdiv_rn(__uint_as_float(__reduce_max_sync(0xffffffffu, largest)), 127.0f);
    const uint16_t scale = cuda::scale_bits(__float_as_uint(step));
    const float divisor = scale_of(scale);
    const auto code = [&](int dim) {
      return divisor > 0 ? __float2int_rn(__fdiv_rn(to_float(values[dim]), divisor)) : 0;
    };
    if (a.head_dim % 4 == 0) {
      for (int dim = 4 * lane; dim < a.head_dim; dim += 4 * kWarp) {
        reinterpret_cast<char4*>(codes)[dim / 4] =
            make_char4(static_cast<signed char>(code(dim)), static_cast<signed char>(code(dim + 1)),
                       static_cast<signed char>(code(dim + 2)), static_cast<signed char>(code(dim + 3)));
      }
    } else {
      for (int dim = lane; dim < a.head_dim; dim += kWarp) codes[dim] = static_cast<int8_t>(code(dim));
    }
    if (lane == 0) a.scales[row] = scale;
  }
}

}  // namespace

Status copy_values_cuda(const CopyValuesArguments& a, ExecutionContext& context) {
  const auto blocks = static_cast<unsigned>(a.copies);
  cudaStream_t stream = stream_of(context);
  if (a.scales != nullptr) {
    with_cuda_float_type(a.dtype, [&](auto element) {
      write_codes<decltype(element)><<<blocks, kThreads, 0, stream>>>(a);
    });
    return launch_status();
  }
  const auto bytes = static_cast<int64_t>(byte_size(a.dtype));
  const uintptr_t all = reinterpret_cast<uintptr_t>(a.values) | reinterpret_cast<uintptr_t>(a.pool) |
                        static_cast<uintptr_t>((a.block_stride | a.token_stride | a.head_dim) * bytes);
  if (all % 16 == 0) copy_blocks<uint4><<<blocks, kThreads, 0, stream>>>(a, static_cast<int>(bytes));
  else if (all % 4 == 0) copy_blocks<uint32_t><<<blocks, kThreads, 0, stream>>>(a, static_cast<int>(bytes));
  else copy_blocks<uint16_t><<<blocks, kThreads, 0, stream>>>(a, static_cast<int>(bytes));
  return launch_status();
}

}  // namespace kv
