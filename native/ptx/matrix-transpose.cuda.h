// Transposes an 8x8 matrix of 16-bit elements that a warp holds (sm_75). Lane l gives two elements of row l / 4,
// those of columns 2 * (l % 4) and the next, and gets the same two of column l / 4. This turns the result layout of
// mma into its operand layout.
#pragma once

#include <cstdint>

namespace kv::ptx {

__device__ inline uint32_t transpose_matrix(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

}  // namespace kv::ptx
