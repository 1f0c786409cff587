// Division by a number that is used many times, such as the tokens of a block. Device code.
#pragma once

#include <cstdint>

namespace kv {

// By how much to shift instead of dividing, or -1 if the divisor is no power of two.
__device__ inline int shift_of(int divisor) { return (divisor & (divisor - 1)) == 0 ? __ffs(divisor) - 1 : -1; }

// Each division takes four instructions, where one by a number that the compiler does not know takes some twenty.
class Divisor {
 public:
  __device__ explicit Divisor(int divisor) : divisor_(divisor), reciprocal_(UINT32_MAX / static_cast<uint32_t>(divisor)) {}

  __device__ int divisor() const { return divisor_; }

  // `number` is not negative. The first guess is the quotient or one less.
  __device__ int quotient(int number) const {
    const int guess = static_cast<int>(__umulhi(static_cast<uint32_t>(number), reciprocal_));
    return guess + (number - guess * divisor_ >= divisor_ ? 1 : 0);
  }
  __device__ int remainder(int number) const { return number - quotient(number) * divisor_; }

 private:
  int divisor_;
  uint32_t reciprocal_;
};

}  // namespace kv
