// Rotation and scales of quantized blocks, for CPU kernels.
#pragma once

#include "shared/cpu/simd.cpu.h"
#include "shared/quantized-blocks/quantized-blocks.h"

namespace kv {
namespace KV_ISA {

inline float scale_of(uint8_t code) { return half_to_float(static_cast<uint16_t>(code << 7)) * 0x1p-4f; }

// The scale of a group whose largest magnitude has these bits.
inline uint8_t scale_of_group(int32_t largest, int bits) {
  float magnitude;
  std::memcpy(&magnitude, &largest, 4);
  const float step = magnitude / largest_steps(bits);
  uint32_t word;
  std::memcpy(&word, &step, 4);
  return scale_code(word);
}

// The sign bit of every dim that the rotation negates.
struct RotationSigns {
  int32_t of[kMostQuantizedDims] = {};
  constexpr RotationSigns() {
    for (int dim = 0; dim < kMostQuantizedDims; ++dim) of[dim] = rotation_negates(dim) ? INT32_MIN : 0;
  }
};
constexpr RotationSigns kRotationSigns;

inline Vec with_signs(Vec v, const int32_t* signs) {
  VecInt bits;
  std::memcpy(&bits, signs, sizeof bits);
  return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(v) ^ bits);
}

// The butterflies of strides from `stride` on that stay within a vector.
template <int stride = 1>
inline Vec butterflies(Vec v, int run) {
  if constexpr (stride < kLanes) {
    if (stride >= run) return v;
    VecInt partner = {};
    int32_t negated[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      partner[i] = i ^ stride;
      negated[i] = i & stride ? INT32_MIN : 0;
    }
    return butterflies<2 * stride>(permute(v, v, partner) + with_signs(v, negated), run);
  } else {
    return v;
  }
}

// row = H row, for every run. The row is filled up to whole groups with zeros, which stay zeros.
inline void multiply_by_hadamard(float* row, int head_dim) {
  const int dims = quantized_groups(head_dim) * kQuantizedGroupDims;
  const int run = rotation_run(head_dim);
  for (int dim = 0; dim < dims; dim += kLanes) store(row + dim, butterflies(load(row + dim), run));
  for (int stride = kLanes; stride < run; stride *= 2) {
    for (int first = 0; first < dims; first += 2 * stride) {
      for (float* p = row + first; p < row + first + stride; p += kLanes) {
        const Vec a = load(p);
        const Vec b = load(p + stride);
        store(p, a + b);
        store(p + stride, a - b);
      }
    }
  }
}

// row = H (s * row) / sqrt(n). The row is filled up to whole groups with zeros.
inline void rotate(float* row, int head_dim) {
  const int dims = quantized_groups(head_dim) * kQuantizedGroupDims;
  for (int dim = 0; dim < dims; dim += kLanes) store(row + dim, with_signs(load(row + dim), kRotationSigns.of + dim));
  multiply_by_hadamard(row, head_dim);
  const float factor = rotation_factor(rotation_run(head_dim));
  for (int dim = 0; dim < dims; dim += kLanes) store(row + dim, load(row + dim) * factor);
}

// row = s * (H row) / sqrt(n), the inverse. The row is filled up to whole groups with zeros.
inline void rotate_back(float* row, int head_dim) {
  const int dims = quantized_groups(head_dim) * kQuantizedGroupDims;
  multiply_by_hadamard(row, head_dim);
  const float factor = rotation_factor(rotation_run(head_dim));
  for (int dim = 0; dim < dims; dim += kLanes) {
    store(row + dim, with_signs(load(row + dim) * factor, kRotationSigns.of + dim));
  }
}

}  // namespace KV_ISA
}  // namespace kv
