// Loads and stores four 8x8 matrices of 16-bit elements, between shared memory and the fragments of mma. Lane l gives
// the address of row l % 8 of matrix l / 8. Of each matrix, lane l then holds two elements of row l / 4: those of
// columns 2 * (l % 4) and the next.
#pragma once

#include <cstdint>

#include "ptx/shared-address.cuda.h"

namespace kv::ptx {

__device__ inline void load_matrices(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// Like load_matrices, but transposes each matrix.
__device__ inline void load_matrices_transposed(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// Needs sm_90. `row` is an address in shared memory.
__device__ inline void store_matrices_at(uint32_t row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

__device__ inline void store_matrices(void* row, const uint32_t (&fragment)[4]) {
  store_matrices_at(shared_address(row), fragment);
}

// Like store_matrices, but transposes each matrix.
__device__ inline void store_matrices_transposed(void* row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

}  // namespace kv::ptx
