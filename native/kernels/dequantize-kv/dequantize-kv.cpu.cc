#include "kernels/dequantize-kv/dequantize-kv.h"

#include "runtime/workers.h"
#include "shared/quantized-blocks/quantized-blocks.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Unsigned or signed bytes as floats.
template <class Byte>
inline Vec load_bytes(const uint8_t* bytes) {
  typedef Byte Bytes __attribute__((vector_size(kLanes)));
  Bytes narrow;
  std::memcpy(&narrow, bytes, sizeof narrow);
  return __builtin_convertvector(__builtin_convertvector(narrow, VecInt), Vec);
}

void decode_group(const uint8_t* codes, float step, int bits, float* group) {
  if (bits == 8) {
    for (int i = 0; i < kQuantizedGroupDims; i += kLanes) store(group + i, load_bytes<int8_t>(codes + i) * step);
    return;
  }
  uint8_t nibbles[kQuantizedGroupDims];
  for (int i = 0; i < kQuantizedGroupDims / 2; ++i) {
    nibbles[i] = codes[i] & 15;
    nibbles[kQuantizedGroupDims / 2 + i] = codes[i] >> 4;
  }
  for (int i = 0; i < kQuantizedGroupDims; i += kLanes) {
    store(group + i, (load_bytes<uint8_t>(nibbles + i) - kMiddleCode4) * step);
  }
}

template <class T>
void store_row(const float* row, int head_dim, T* elements) {
  int dim = 0;
  for (; dim + kLanes <= head_dim; dim += kLanes) store(elements + dim, load(row + dim));
  for (; dim < head_dim; ++dim) from_float(elements + dim, row[dim]);
}

template <class T>
void dequantize_block(const uint8_t* quantized, int bits, int head_dim, T* dense, int64_t token_stride) {
  const int groups = quantized_groups(head_dim);
  const uint8_t* codes = quantized;
  const uint8_t* scales = quantized + scale_offset(head_dim, bits);
  float row[kMostQuantizedDims];
  for (int token = 0; token < kQuantizedBlockTokens; ++token) {
    for (int group = 0; group < groups; ++group) {
      decode_group(codes, scale_of(*scales++), bits, row + group * kQuantizedGroupDims);
      codes += kQuantizedGroupDims * bits / 8;
    }
    rotate_back(row, head_dim);
    store_row(row, head_dim, dense + token * token_stride);
  }
}

}  // namespace

void dequantize_kv(const DequantizeKvArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.copies) * 2, [&](size_t index, int) {
    const bool values = index % 2 == 1;
    const int bits = values ? a.value_bits : a.key_bits;
    const uint8_t* pool = values ? a.quantized_values : a.quantized_keys;
    const uint8_t* quantized = pool + a.from[index / 2] * quantized_block_bytes(a.head_dim, bits);
    with_float_type(a.dtype, [&](auto element) {
      auto* dense = static_cast<decltype(element)*>(values ? a.values : a.keys);
      dequantize_block(quantized, bits, a.head_dim, dense + a.to[index / 2] * a.block_stride, a.token_stride);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
