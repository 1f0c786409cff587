// Transposes an 8x8 matrix of 16-bit elements that a warp holds (sm_75): lane l gives the elements 2 * (l % 4) and the
// next of row l / 4, and gets those of column l / 4. It turns what mma accumulates into what mma multiplies by.
#pragma once

#include <cstdint>

namespace kv::ptx {

__device__ inline uint32_t transpose_matrix(uint32_t rows) {
  uint32_t columns;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(columns) : "r"(rows));
  return columns;
}

}  // namespace kv::ptx
