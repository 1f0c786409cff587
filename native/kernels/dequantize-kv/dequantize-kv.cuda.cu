#include "kernels/dequantize-kv/dequantize-kv.h"
#include "shared/quantized-blocks/quantized-blocks.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 16;

// What the code of a lane's dim stands for, in steps. `codes` are those of its group.
__device__ float steps_of(const uint8_t* codes, int lane, int bits) {
  if (bits == 8) return static_cast<float>(static_cast<int8_t>(codes[lane]));
  return static_cast<float>(codes[lane % 16] >> lane / 16 * 4 & 15) - kMiddleCode4;
}

// One thread block reads one block of keys or of values, and a warp one token at a time.
template <class T, int most_groups>
__global__ void __launch_bounds__(kWarps * kWarp) dequantize_blocks(const __grid_constant__ DequantizeKvArguments a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool values = blockIdx.y == 1;
  const int bits = values ? a.value_bits : a.key_bits;
  const int groups = quantized_groups(a.head_dim);
  const uint8_t* quantized = (values ? a.quantized_values : a.quantized_keys) +
                             a.from[blockIdx.x] * quantized_block_bytes(a.head_dim, bits);
  const uint8_t* scales = quantized + scale_offset(a.head_dim, bits);
  T* dense = static_cast<T*>(values ? a.values : a.keys) + a.to[blockIdx.x] * a.block_stride;
  for (int token = static_cast<int>(threadIdx.x) / kWarp; token < kQuantizedBlockTokens; token += kWarps) {
    const uint8_t* codes = quantized + token * code_row_bytes(a.head_dim, bits);
    float row[most_groups] = {};
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      if (g >= groups) break;
      row[g] = steps_of(codes + g * kQuantizedGroupDims * bits / 8, lane, bits) * scale_of(scales[token * groups + g]);
    }
    rotate_back(row, a.head_dim);
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      const int dim = g * kQuantizedGroupDims + lane;
      if (dim < a.head_dim) dense[token * a.token_stride + dim] = from_float<T>(row[g]);
    }
  }
}

template <int most_groups>
Status launch(const DequantizeKvArguments& a, ExecutionContext& context) {
  with_cuda_float_type(a.dtype, [&](auto element) {
    dequantize_blocks<decltype(element), most_groups>
        <<<dim3(static_cast<unsigned>(a.copies), 2), kWarps * kWarp, 0, stream_of(context)>>>(a);
  });
  return launch_status();
}

}  // namespace

Status dequantize_kv_cuda(const DequantizeKvArguments& a, ExecutionContext& context) {
  return with_most_groups(a.head_dim, [&](auto most_groups) { return launch<most_groups>(a, context); });
}

}  // namespace kv
