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

// Codes of 4, 3 or 2 bits. What is not negative rounds down where it is cut off.
inline VecInt codes_below_8(Vec v, float step, int bits) {
  const auto negative = static_cast<float>(negative_codes(bits));
  return __builtin_convertvector(clamp(v / splat(step) + splat(negative), 0.0f, 2 * negative - 1), VecInt);
}

// Writes the codes of a group and returns its scale. Codes of 3 and 2 bits have a byte each, until the row is packed.
uint8_t quantize_group(const float* group, int bits, uint8_t* codes) {
  const uint8_t scale = scale_of_group(largest_magnitude(group), bits);
  const float step = scale_of(scale);
  if (bits < 4) {
    std::memset(codes, negative_codes(bits), kQuantizedGroupDims);
    if (!(step > 0)) return scale;
    for (int i = 0; i < kQuantizedGroupDims; i += kLanes) store_bytes(codes + i, codes_below_8(load(group + i), step, bits));
  } else if (!(step > 0)) {
    std::memset(codes, bits == 8 ? 0 : 0x88, static_cast<size_t>(kQuantizedGroupDims * bits / 8));
  } else if (bits == 8) {
    for (int i = 0; i < kQuantizedGroupDims; i += kLanes) store_bytes(codes + i, codes_8(load(group + i), step));
  } else {
    for (int i = 0; i < kQuantizedGroupDims / 2; i += kLanes) {
      const VecInt low = codes_below_8(load(group + i), step, 4);
      const VecInt high = codes_below_8(load(group + kQuantizedGroupDims / 2 + i), step, 4);
      store_bytes(codes + i, low | high << 4);
    }
  }
  return scale;
}

// The lower two bits of a row's codes of 3 or 2 bits, and, of 3, the upper one.
void pack_pairs(const uint8_t* codes, int pairs, int bits, uint8_t* lower, uint8_t* upper) {
  for (int pair = 0; pair < pairs; ++pair, codes += 64, lower += 16) {
    for (int j = 0; j < 16; ++j) {
      lower[j] = static_cast<uint8_t>((codes[j] & 3) | (codes[16 + j] & 3) << 2 | (codes[32 + j] & 3) << 4 | codes[48 + j] << 6);
    }
    if (bits == 2) continue;
    for (int j = 0; j < 8; ++j) {
      int byte = 0;
      for (int bit = 0; bit < 8; ++bit) byte |= codes[j + bit / 4 * 8 + bit % 4 * 16] >> 2 << bit;
      *upper++ = static_cast<uint8_t>(byte);
    }
  }
}

struct Format {
  int head_dim;
  int bits;
  bool rotated;
};

template <class T>
void quantize_block(const T* dense, int64_t token_stride, const Format& format, uint8_t* quantized) {
  const int head_dim = format.head_dim, bits = format.bits;
  const int groups = quantized_groups(head_dim), pairs = quantized_pairs(head_dim);
  uint8_t* scales = quantized + scale_offset(head_dim, bits);
  float row[kMostQuantizedDims];
  uint8_t loose[kMostQuantizedDims];
  if (bits < 4) std::memset(loose, negative_codes(bits), static_cast<size_t>(pairs * 64));
  for (int token = 0; token < kQuantizedBlockTokens; ++token) {
    load_row(dense + token * token_stride, head_dim, row);
    if (format.rotated) rotate(row, head_dim);
    uint8_t* codes = quantized + token * code_row_bytes(head_dim, bits);
    for (int group = 0; group < groups; ++group) {
      uint8_t* to = bits < 4 ? loose + group * kQuantizedGroupDims : codes + group * kQuantizedGroupDims * bits / 8;
      *scales++ = quantize_group(row + group * kQuantizedGroupDims, bits, to);
    }
    uint8_t* upper = quantized + upper_offset(head_dim, bits) + token * upper_row_bytes(head_dim, bits);
    if (bits < 4) pack_pairs(loose, pairs, bits, codes, upper);
  }
}

}  // namespace

void quantize_kv(const QuantizeKvArguments& a, Workers& workers) {
  const size_t kinds = a.values == nullptr ? 1 : 2;
  workers.for_each(static_cast<size_t>(a.copies) * kinds, [&](size_t index, int) {
    const bool values = index % kinds == 1;
    const size_t copy = index / kinds;
    const Format format{a.head_dim, values ? a.value_bits : a.key_bits, a.rotated};
    uint8_t* pool = values ? a.quantized_values : a.quantized_keys;
    uint8_t* quantized = pool + a.to[copy] * quantized_block_bytes(a.head_dim, format.bits);
    with_float_type(a.dtype, [&](auto element) {
      const auto* dense = static_cast<const decltype(element)*>(values ? a.values : a.keys);
      quantize_block(dense + a.from[copy] * a.block_stride, a.token_stride, format, quantized);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
