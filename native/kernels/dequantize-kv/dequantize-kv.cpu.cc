#include "kernels/dequantize-kv/dequantize-kv.h"

#include "runtime/workers.h"
#include "shared/quantized-blocks/quantized-blocks.cpu.h"
#include "shared/quantized-blocks/quantized-rows.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class T>
void store_row(const float* row, int head_dim, T* elements) {
  int dim = 0;
  for (; dim + kLanes <= head_dim; dim += kLanes) store(elements + dim, load(row + dim));
  for (; dim < head_dim; ++dim) from_float(elements + dim, row[dim]);
}

template <int kBits, class T>
void dequantize_block(const DequantizeKvArguments& a, const uint8_t* pool, int32_t number, T* dense) {
  const int dims = quantized_groups(a.head_dim) * kQuantizedGroupDims;
  float scales[kQuantizedBlockTokens * quantized_groups(kMostQuantizedDims)];
  float row[kMostQuantizedDims];
  const auto block = QuantizedPool<kBits>(pool, a.head_dim).open(number, nullptr, scales);
  for (int token = 0; token < kQuantizedBlockTokens; ++token) {
    for (int dim = 0; dim < dims; dim += kLanes) store(row + dim, block.at(token, dim));
    if (a.rotated) rotate_back(row, a.head_dim);
    store_row(row, a.head_dim, dense + token * a.token_stride);
  }
}

}  // namespace

void dequantize_kv(const DequantizeKvArguments& a, Workers& workers) {
  const size_t kinds = a.values == nullptr ? 1 : 2;
  workers.for_each(static_cast<size_t>(a.copies) * kinds, [&](size_t index, int) {
    const bool values = index % kinds == 1;
    const size_t copy = index / kinds;
    const uint8_t* pool = values ? a.quantized_values : a.quantized_keys;
    with_float_type(a.dtype, [&](auto element) {
      auto* dense = static_cast<decltype(element)*>(values ? a.values : a.keys) + a.to[copy] * a.block_stride;
      with_code_bits(values ? a.value_bits : a.key_bits, [&](auto bits) {
        dequantize_block<decltype(bits)::count>(a, pool, a.from[copy], dense);
      });
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
