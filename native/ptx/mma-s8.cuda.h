// d = a * b by one warp on signed bytes (sm_80). a is [16, 32] and b is [32, 8]; d is [16, 8] in s32. Lane l holds four
// neighbouring columns of a and rows of b in a register: a of rows l / 4 and l / 4 + 8 from column 4 * (l % 4), then from
// 16 more; b of column l / 4 from the same rows. It holds the elements (l / 4, 2 * (l % 4) + {0, 1}) and (l / 4 + 8, the
// same columns) of d.
#pragma once

#include <cstdint>

namespace kv::ptx {

__device__ inline void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

}  // namespace kv::ptx
