#pragma once

#include <cmath>
#include <cstdint>

namespace kv {

// What the bits of a finite f16 number stand for.
inline double value_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

}  // namespace kv
