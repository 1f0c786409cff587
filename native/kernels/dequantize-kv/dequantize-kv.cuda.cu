#include "kernels/dequantize-kv/dequantize-kv.h"
#include "shared/quantized-blocks/quantized-blocks.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 16;

// One thread block reads one block of keys or of values, and a warp one token at a time. With `pairs` there may be codes of
// 3 or 2 bits, whose code takes registers.
template <class T, int most_groups, bool pairs>
__global__ void __launch_bounds__(kWarps * kWarp) dequantize_blocks(const __grid_constant__ DequantizeKvArguments a) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool values = blockIdx.y == 1;
  const int bits = values ? a.value_bits : a.key_bits;
  __builtin_assume(pairs || bits >= 4);
  const int groups = quantized_groups(a.head_dim);
  const uint8_t* quantized = (values ? a.quantized_values : a.quantized_keys) +
                             a.from[blockIdx.x] * quantized_block_bytes(a.head_dim, bits);
  const uint8_t* scales = quantized + scale_offset(a.head_dim, bits);
  T* dense = static_cast<T*>(values ? a.values : a.keys) + a.to[blockIdx.x] * a.block_stride;
  for (int token = static_cast<int>(threadIdx.x) / kWarp; token < kQuantizedBlockTokens; token += kWarps) {
    const CodeRow codes(quantized, a.head_dim, bits, token);
    float row[most_groups] = {};
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      if (g >= groups) break;
      row[g] = codes.steps(g, lane) * scale_of(scales[token * groups + g]);
    }
    if (a.rotated) rotate_back(row, a.head_dim);
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      const int dim = g * kQuantizedGroupDims + lane;
      if (dim < a.head_dim) dense[token * a.token_stride + dim] = from_float<T>(row[g]);
    }
  }
}

template <int most_groups, bool pairs>
Status launch(const DequantizeKvArguments& a, ExecutionContext& context) {
  with_cuda_float_type(a.dtype, [&](auto element) {
    dequantize_blocks<decltype(element), most_groups, pairs>
        <<<dim3(static_cast<unsigned>(a.copies), a.values == nullptr ? 1 : 2), kWarps * kWarp, 0, stream_of(context)>>>(a);
  });
  return launch_status();
}

}  // namespace

Status dequantize_kv_cuda(const DequantizeKvArguments& a, ExecutionContext& context) {
  const bool pairs = a.key_bits < 4 || (a.values != nullptr && a.value_bits < 4);
  return with_most_groups(a.head_dim, [&](auto most_groups) {
    return pairs ? launch<most_groups, true>(a, context) : launch<most_groups, false>(a, context);
  });
}

}  // namespace kv
