// Queries that tensor cores multiply with codes: a query in 16 bits is two operands of signed bytes, so that a product with
// the codes of a group is exact. Device code.
#pragma once

#include <cmath>
#include <cstdint>

#include "shared/quantized-blocks/quantized-blocks.cuda.h"

namespace kv {

constexpr int kQuantizedRows = 8;  // query rows of a pack

// The rotated queries of a pack, in shared memory: row r = units[r] * (256 * digits[r] + digits[8 + r]). The unit of a row
// that is not finite is NaN.
template <int kHeadDim>
struct QueryDigits {
  static constexpr int kRowBytes = kHeadDim + 16;  // so that the same chunk of eight rows is in different banks
  alignas(16) int8_t digits[2 * kQuantizedRows][kRowBytes];
  float units[kQuantizedRows];
};

// A warp writes one row. `row` has dim l of group g in row[g] of lane l.
template <int kHeadDim>
__device__ void write_digits(float (&row)[kHeadDim / 32], int number, QueryDigits<kHeadDim>& to) {
  constexpr float kMost = 127 * 256 + 127;
  const int lane = threadIdx.x % 32;
  unsigned largest_bits = 0;
#pragma unroll
  for (const float x : row) largest_bits = max(largest_bits, __float_as_uint(x) & 0x7fffffffu);
  largest_bits = __reduce_max_sync(0xffffffffu, largest_bits);
  const float largest = __uint_as_float(largest_bits);
  const bool finite = largest < INFINITY;
#pragma unroll
  for (int g = 0; g < kHeadDim / 32; ++g) {
    const int whole = finite && largest > 0.0f ? __float2int_rn(row[g] / largest * kMost) : 0;
    const int high = (whole + 128) >> 8;
    to.digits[number][32 * g + lane] = static_cast<int8_t>(high);
    to.digits[kQuantizedRows + number][32 * g + lane] = static_cast<int8_t>(whole - 256 * high);
  }
  if (lane == 0) to.units[number] = finite ? largest / kMost : NAN;
}

}  // namespace kv
