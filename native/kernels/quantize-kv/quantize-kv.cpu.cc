#include "kernels/quantize-kv/quantize-kv.h"

#include "runtime/workers.h"
#include "shared/quantized-blocks/quantized-blocks.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// A row as f32, filled up to whole groups with zeros.
template <class T>
void load_row(const T* elements, int head_dim, float* row) {
  int dim = 0;
  for (; dim + kLanes <= head_dim; dim += kLanes) store(row + dim, load(elements + dim));
  for (; dim < head_dim; ++dim) row[dim] = to_float(elements[dim]);
  for (; dim % kQuantizedGroupDims != 0; ++dim) row[dim] = 0;
}

// The bits of a group's largest magnitude. NaN is larger than infinity.
int32_t largest_magnitude(const float* group) {
  VecInt largest = {};
  for (int i = 0; i < kQuantizedGroupDims; i += kLanes) {
    const VecInt bits = reinterpret_cast<VecInt>(load(group + i)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int32_t result = 0;
  for (int i = 0; i < kLanes; ++i) result = largest[i] > result ? largest[i] : result;
  return result;
}

inline Vec clamp(Vec v, float least, float most) {
  v = v < least ? splat(least) : v;
  return v > most ? splat(most) : v;
}

inline void store_bytes(uint8_t* bytes, VecInt v) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes narrow = __builtin_convertvector(v, Bytes);
  std::memcpy(bytes, &narrow, sizeof narrow);
}

inline VecInt codes_8(Vec v, float step) {
  // Adding the magic constant rounds to an integer, ties to even, in the low bits.
  const Vec rounded = clamp(v / splat(step), -127.0f, 127.0f) + splat(12582912.0f);
  return reinterpret_cast<VecInt>(rounded) - 0x4b400000;
}

// What is not negative rounds down where it is cut off.
inline VecInt codes_4(Vec v, float step) {
  return __builtin_convertvector(clamp(v / splat(step) + splat(8.0f), 0.0f, 15.0f), VecInt);
}

// Writes the codes of a group and returns its scale.
uint8_t quantize_group(const float* group, int bits, uint8_t* codes) {
  const uint8_t scale = scale_of_group(largest_magnitude(group), bits);
  const float step = scale_of(scale);
  if (!(step > 0)) {
    std::memset(codes, bits == 8 ? 0 : 0x88, static_cast<size_t>(kQuantizedGroupDims * bits / 8));
  } else if (bits == 8) {
    for (int i = 0; i < kQuantizedGroupDims; i += kLanes) store_bytes(codes + i, codes_8(load(group + i), step));
  } else {
    for (int i = 0; i < kQuantizedGroupDims / 2; i += kLanes) {
      const VecInt low = codes_4(load(group + i), step);
      const VecInt high = codes_4(load(group + kQuantizedGroupDims / 2 + i), step);
      store_bytes(codes + i, low | high << 4);
    }
  }
  return scale;
}

template <class T>
void quantize_block(const T* dense, int64_t token_stride, int head_dim, int bits, uint8_t* quantized) {
  const int groups = quantized_groups(head_dim);
  uint8_t* codes = quantized;
  uint8_t* scales = quantized + scale_offset(head_dim, bits);
  float row[kMostQuantizedDims];
  for (int token = 0; token < kQuantizedBlockTokens; ++token) {
    load_row(dense + token * token_stride, head_dim, row);
    rotate(row, head_dim);
    for (int group = 0; group < groups; ++group) {
      *scales++ = quantize_group(row + group * kQuantizedGroupDims, bits, codes);
      codes += kQuantizedGroupDims * bits / 8;
    }
  }
}

}  // namespace

void quantize_kv(const QuantizeKvArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.copies) * 2, [&](size_t index, int) {
    const bool values = index % 2 == 1;
    const int bits = values ? a.value_bits : a.key_bits;
    uint8_t* pool = values ? a.quantized_values : a.quantized_keys;
    uint8_t* quantized = pool + a.to[index / 2] * quantized_block_bytes(a.head_dim, bits);
    with_float_type(a.dtype, [&](auto element) {
      const auto* dense = static_cast<const decltype(element)*>(values ? a.values : a.keys);
      quantize_block(dense + a.from[index / 2] * a.block_stride, a.token_stride, a.head_dim, bits, quantized);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
