// Wrappers of single instructions: approximate functions, conversions, and arithmetic on pairs of 16-bit numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kv::ptx {

// 2^x with a relative error of about 2^-22. 0 for minus infinity.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x up to rounding. NaN for zeros, infinities and what is not normal.
__device__ inline double reciprocal(double x) {
  double rough;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(rough) : "d"(x));
  const double error = fma(-x, rough, 1.0);  // at most about 2^-20, so its cube is lost
  return fma(rough, fma(error, error, error), rough);
}

// The larger one, or NaN if either is NaN.
__device__ inline float larger_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Rounded to tf32, whose last 13 bits are zeros.
__device__ inline uint32_t rounded_to_tf32(uint32_t float_bits) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "r"(float_bits));
  return bits;
}

// Two values, rounded to Element. `low` is in the low half.
template <typename Element>
__device__ inline uint32_t pack(float low, float high) {
  uint32_t result;
  if constexpr (std::is_same_v<Element, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

// x & mask ^ flips, in one instruction. Compilers make two of it when both are constants.
__device__ inline uint32_t mask_and_flip(uint32_t x, uint32_t mask, uint32_t flips) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(x), "r"(mask), "r"(flips));
  return result;
}

// 0xffff for each half of x whose highest bit is set, 0 for each other half.
__device__ inline uint32_t halves_with_sign(uint32_t x) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(result) : "r"(x));
  return result;
}

}  // namespace kv::ptx
