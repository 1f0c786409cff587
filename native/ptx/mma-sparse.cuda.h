// d += a * b by one warp (sm_80). a is [16, 32] and 2:4 sparse: of each four elements of a row, two are stored. These
// lie like the [16, 16] operand of mma_m16n8k16. b is [32, 8], d is [16, 8] in f32. Register i of lane l holds the
// elements (8 * i + 2 * (l % 4) + {0, 1}, l / 4) of b.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kv::ptx {

// The metadata registers cover a [16, 64] matrix, which is multiplied in two products: columns 0 to 31 (kHalf 0) and
// columns 32 to 63 (kHalf 1). Lane 4 * g + c holds the metadata of 16 columns, from column 16 * c on, of row g (low
// 16 bits) and row g + 8. Each four columns take four bits, the first four columns lowest. These bits are the index
// of the first non-zero and then the index of the second, which is larger.
template <typename Element, int kHalf>
__device__ inline void mma_sparse_m16n8k32(float* d, const uint32_t (&a)[4], const uint32_t* b, uint32_t metadata) {
  if constexpr (std::is_same_v<Element, __half>) {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kHalf));
  } else {
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata),
          "n"(kHalf));
  }
}

}  // namespace kv::ptx
