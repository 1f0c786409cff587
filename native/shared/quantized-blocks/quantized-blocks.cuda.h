// Rotation and scales of quantized blocks, for CUDA kernels. Device code.
#pragma once

#include <type_traits>

#include "shared/cuda/elements.cuda.h"
#include "shared/quantized-blocks/quantized-blocks.h"

namespace kv {

__device__ inline float scale_of(uint8_t code) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(code << 7))) * 0x1p-4f;
}

// The scale of a group whose largest magnitude has these bits.
__device__ inline uint8_t scale_of_group(uint32_t largest, int bits) {
  return scale_code(__float_as_uint(__fdiv_rn(__uint_as_float(largest), largest_steps(bits))));
}

// The codes of a token of a block.
struct CodeRow {
  const uint8_t* codes;
  const uint8_t* upper;
  int bits;

  __device__ CodeRow(const uint8_t* block, int head_dim, int bits, int token)
      : codes(block + token * code_row_bytes(head_dim, bits)),
        upper(block + upper_offset(head_dim, bits) + token * upper_row_bytes(head_dim, bits)),
        bits(bits) {}

  // What the code of a dim of a group stands for, over the group's step.
  __device__ float steps(int group, int dim) const {
    if (bits == 8) return static_cast<float>(static_cast<int8_t>(codes[group * kQuantizedGroupDims + dim]));
    return static_cast<float>(code(group, dim)) - middle_code(bits);
  }

 private:
  __device__ int code(int group, int dim) const {
    if (bits == 4) return codes[group * 16 + dim % 16] >> dim / 16 * 4 & 15;
    const int pair = group / 2, sixteen = group % 2 * 2 + dim / 16;
    const int lower = codes[pair * 16 + dim % 16] >> 2 * sixteen & 3;
    return bits == 2 ? lower : lower | (upper[pair * 8 + dim % 8] >> (dim / 8 % 2 * 4 + sixteen) & 1) << 2;
  }
};

// A warp holds a row: lane l has dim l of group g in row[g], and 0 where there is no such dim. `most_groups` is a power
// of two. All products are exact or stand alone, so that nothing is rounded otherwise than on the CPU.

// Calls body with the number of groups, as a constant, that a kernel for heads of so many dims has room for. Host code.
template <class Body>
auto with_most_groups(int head_dim, Body&& body) {
  if (head_dim <= 64) return body(std::integral_constant<int, 2>());
  if (head_dim <= 128) return body(std::integral_constant<int, 4>());
  if (head_dim <= 256) return body(std::integral_constant<int, 8>());
  return body(std::integral_constant<int, 16>());
}

// row = H row, for every run.
template <int most_groups>
__device__ void multiply_by_hadamard(float (&row)[most_groups], int run) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int stride = 1; stride < kWarp; stride *= 2) {
    if (stride >= run) return;
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      const float partner = __shfl_xor_sync(0xffffffffu, row[g], stride);
      row[g] = lane & stride ? partner - row[g] : row[g] + partner;
    }
  }
#pragma unroll
  for (int stride = 1; stride < most_groups; stride *= 2) {
    if (stride * kWarp >= run) return;
#pragma unroll
    for (int g = 0; g < most_groups; ++g) {
      if (g & stride) continue;
      const float a = row[g];
      const float b = row[g + stride];
      row[g] = a + b;
      row[g + stride] = a - b;
    }
  }
}

template <int most_groups>
__device__ void apply_signs(float (&row)[most_groups]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int g = 0; g < most_groups; ++g) {
    if (rotation_negates(g * kWarp + lane)) row[g] = -row[g];
  }
}

// row = H (s * row) / sqrt(n).
template <int most_groups>
__device__ void rotate(float (&row)[most_groups], int head_dim) {
  apply_signs(row);
  multiply_by_hadamard(row, rotation_run(head_dim));
  const float factor = rotation_factor(rotation_run(head_dim));
#pragma unroll
  for (int g = 0; g < most_groups; ++g) row[g] *= factor;
}

// row = s * (H row) / sqrt(n), the inverse.
template <int most_groups>
__device__ void rotate_back(float (&row)[most_groups], int head_dim) {
  multiply_by_hadamard(row, rotation_run(head_dim));
  const float factor = rotation_factor(rotation_run(head_dim));
#pragma unroll
  for (int g = 0; g < most_groups; ++g) row[g] *= factor;
  apply_signs(row);
}

}  // namespace kv
