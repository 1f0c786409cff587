#include "kernels/copy-values/copy-values.h"

#include "kernels/copy-values/copy-values-code.h"
#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Returns the scale.
template <class T>
uint16_t write_codes(const T* values, int32_t dims, int8_t* codes) {
  uint32_t largest = 0;
  for (int32_t dim = 0; dim < dims; ++dim) {
    const float value = to_float(values[dim]);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  const float step = magnitude / 127;
  uint32_t bits;
  std::memcpy(&bits, &step, sizeof bits);
  const uint16_t scale = scale_bits(bits);
  const float divisor = bfloat_to_float(scale);
  for (int32_t dim = 0; dim < dims; ++dim) {
    // Adding the magic constant rounds to an integer, ties to even.
    const float code = (to_float(values[dim]) / divisor + 12582912.0f) - 12582912.0f;
    codes[dim] = divisor > 0 ? static_cast<int8_t>(code) : int8_t{0};
  }
  return scale;
}

template <class T>
void copy_block(const CopyValuesArguments& a, const T* from, int64_t to) {
  const int64_t first_row = to * kCopiedBlockTokens;
  for (int32_t token = 0; token < kCopiedBlockTokens; ++token) {
    const int64_t row = first_row + token;
    const T* values = from + token * a.token_stride;
    if (a.scales == nullptr) {
      std::memcpy(static_cast<T*>(a.pool) + row * a.head_dim, values, static_cast<size_t>(a.head_dim) * sizeof(T));
    } else {
      a.scales[row] = write_codes(values, a.head_dim, static_cast<int8_t*>(a.pool) + row * a.head_dim);
    }
  }
}

}  // namespace

void copy_values(const CopyValuesArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.copies), [&](size_t i, int) {
    with_float_type(a.dtype, [&](auto element) {
      copy_block(a, static_cast<const decltype(element)*>(a.values) + a.from[i] * a.block_stride, a.to[i]);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
