#include "kernels/quantize-kv/quantize-kv.h"
#include "shared/quantized-blocks/quantized-blocks.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 16;

// The code of a lane's dim.
__device__ int code_of(float x, float step, int bits) {
  if (bits == 8) return step > 0 ? __float2int_rn(fminf(fmaxf(__fdiv_rn(x, step), -127.0f), 127.0f)) : 0;
  return step > 0 ? __float2int_rd(fminf(fmaxf(__fdiv_rn(x, step) + 8.0f, 0.0f), 15.0f)) : 8;
}

// One thread block writes one block of keys or of values, and a warp one token at a time.
template <class T, int most_groups>
__global__ void __launch_bounds__(kWarps * kWarp) quantize_blocks(const __grid_constant__ QuantizeKvArguments a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool values = blockIdx.y == 1;
  const int bits = values ? a.value_bits : a.key_bits;
  const int groups = quantized_groups(a.head_dim);
  const T* dense = static_cast<const T*>(values ? a.values : a.keys) + a.from[blockIdx.x] * a.block_stride;
  uint8_t* quantized = (values ? a.quantized_values : a.quantized_keys) +
                       a.to[blockIdx.x] * quantized_block_bytes(a.head_dim, bits);
  uint8_t* scales = quantized + scale_offset(a.head_dim, bits);
  for (int token = static_cast<int>(threadIdx.x) / kWarp; token < kQuantizedBlockTokens; token += kWarps) {
    float row[most_groups];
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      const int dim = g * kQuantizedGroupDims + lane;
      row[g] = dim < a.head_dim ? to_float(dense[token * a.token_stride + dim]) : 0.0f;
    }
    rotate(row, a.head_dim);
    uint8_t* codes = quantized + token * code_row_bytes(a.head_dim, bits);
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      if (g >= groups) break;
      const uint32_t largest = __reduce_max_sync(0xffffffffu, __float_as_uint(row[g]) & 0x7fffffffu);
      const uint8_t scale = scale_of_group(largest, bits);
      const int code = code_of(row[g], scale_of(scale), bits);
      if (lane == g) scales[token * groups + g] = scale;
      if (bits == 8) {
        codes[g * kQuantizedGroupDims + lane] = static_cast<uint8_t>(code);
      } else {
        const int high = __shfl_down_sync(0xffffffffu, code, 16);
        if (lane < 16) codes[g * 16 + lane] = static_cast<uint8_t>(code | high << 4);
      }
    }
  }
}

template <int most_groups>
Status launch(const QuantizeKvArguments& a, ExecutionContext& context) {
  with_cuda_float_type(a.dtype, [&](auto element) {
    quantize_blocks<decltype(element), most_groups>
        <<<dim3(static_cast<unsigned>(a.copies), 2), kWarps * kWarp, 0, stream_of(context)>>>(a);
  });
  return launch_status();
}

}  // namespace

Status quantize_kv_cuda(const QuantizeKvArguments& a, ExecutionContext& context) {
  return with_most_groups(a.head_dim, [&](auto most_groups) { return launch<most_groups>(a, context); });
}

}  // namespace kv
