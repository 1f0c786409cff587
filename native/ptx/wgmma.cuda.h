// Matrix products of a warpgroup (sm_90a): d += a * b, with d [64, N] in f32, a [64, 16] and b [16, N] of 16-bit
// elements. They run asynchronously on shared memory. Thread t of the four warps holds two rows of d: row t / 32 * 16
// + t % 32 / 4, and the row 8 below it. Of these it holds the columns 8 * j + 2 * (t % 4) + {0, 1}, in d[4 * j .. 4 *
// j + 3].
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/shared-address.cuda.h"

namespace kv::ptx {

// Describes an operand in shared memory. Its rows of 128 bytes are swizzled as the tensor copy's SWIZZLE_128B leaves
// them. Each 8 rows take 1024 bytes, and the operand starts at a multiple of 1024 bytes. `panel_bytes` is the
// distance between panels of 64 columns if the rows run along N; otherwise it is not read.
__device__ inline uint64_t wgmma_operand(const void* shared, uint32_t panel_bytes = 16) {
  constexpr uint32_t kSwizzle128 = 1u << 30;
  constexpr uint32_t kEightRows = 1024 >> 4;
  const uint32_t low = panel_bytes >> 4 << 16 | shared_address(shared) >> 4;
  return uint64_t{kSwizzle128 | kEightRows} << 32 | low;
}

// The same for rows of 64 bytes, swizzled as SWIZZLE_64B leaves them. Each 8 rows take 512 bytes.
__device__ inline uint64_t wgmma_narrow_operand(const void* shared) {
  constexpr uint32_t kSwizzle64 = 2u << 30;
  constexpr uint32_t kEightRows = 512 >> 4;
  return uint64_t{kSwizzle64 | kEightRows} << 32 | (1u << 16 | shared_address(shared) >> 4);
}

// The same operand, `bytes` later in memory.
__device__ inline uint64_t wgmma_advance(uint64_t operand, uint32_t bytes) {
  const uint32_t low = static_cast<uint32_t>(operand) + (bytes >> 4);
  return operand >> 32 << 32 | low;
}

// Orders this thread's earlier writes of registers before the products that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of all products that were issued since the last commit.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kPending` of the latest groups are unfinished.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of a running product's registers across this point.
template <typename Register, int kCount>
__device__ inline void pin_registers(Register (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (std::is_same_v<Register, float>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

#define KV_D8(d, i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KV_D16(d, i) KV_D8(d, i), KV_D8(d, i + 8)
#define KV_D32(d, i) KV_D8(d, i), KV_D8(d, i + 8), KV_D8(d, i + 16), KV_D8(d, i + 24)
#define KV_D_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KV_D_NAMES_16 KV_D_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KV_D_NAMES_32                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KV_D_NAMES_56                                                                \
  KV_D_NAMES_32                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define KV_D_NAMES_64                                                                \
  KV_D_NAMES_32                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// a and b are in shared memory, both with rows along the summed dimension. Without `accumulate`, d = a * b.
template <typename Element, int N>
struct WgmmaShared;

// The same with the rows of a along M and those of b along N.
template <typename Element, int N>
struct WgmmaSharedByColumn;

// a is in registers, laid out as for mma_m16n8k16. b is in shared memory, with rows along N.
template <typename Element, int N>
struct WgmmaRegisters;

// The same with rows of b along the summed dimension.
template <typename Element, int N>
struct WgmmaRegistersByRow;

#define KV_DEFINE_WGMMA(Element, types, N, D_NAMES, A0, A1, A2, A3, B, ...)                               \
  template <>                                                                                             \
  struct WgmmaShared<Element, N> {                                                                        \
    static __device__ inline void issue(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {     \
      asm volatile(                                                                                       \
          "{\n"                                                                                           \
          ".reg .pred accumulate;\n"                                                                      \
          "setp.ne.b32 accumulate, " A2                                                                   \
          ", 0;\n"                                                                                        \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" D_NAMES "}, " A0 ", " A1           \
          ", accumulate, 1, 1, 0, 0;\n"                                                                   \
          "}"                                                                                             \
          : __VA_ARGS__                                                                                   \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                           \
    }                                                                                                     \
  };                                                                                                      \
  template <>                                                                                             \
  struct WgmmaSharedByColumn<Element, N> {                                                                \
    static __device__ inline void issue(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {     \
      asm volatile(                                                                                       \
          "{\n"                                                                                           \
          ".reg .pred accumulate;\n"                                                                      \
          "setp.ne.b32 accumulate, " A2                                                                   \
          ", 0;\n"                                                                                        \
          "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" D_NAMES "}, " A0 ", " A1           \
          ", accumulate, 1, 1, 1, 1;\n"                                                                   \
          "}"                                                                                             \
          : __VA_ARGS__                                                                                   \
          : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                           \
    }                                                                                                     \
  };                                                                                                      \
  template <>                                                                                             \
  struct WgmmaRegisters<Element, N> {                                                                     \
    static __device__ inline void issue(float (&d)[N / 2], const uint32_t* a, uint64_t b) {               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" D_NAMES "}, {" A0 ", " A1 \
                   ", " A2 ", " A3 "}, " B ", 1, 1, 1, 1;"                                                \
                   : __VA_ARGS__                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
    }                                                                                                     \
  };                                                                                                      \
  template <>                                                                                             \
  struct WgmmaRegistersByRow<Element, N> {                                                                \
    static __device__ inline void issue(float (&d)[N / 2], const uint32_t* a, uint64_t b) {               \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" D_NAMES "}, {" A0 ", " A1 \
                   ", " A2 ", " A3 "}, " B ", 1, 1, 1, 0;"                                                \
                   : __VA_ARGS__                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                 \
    }                                                                                                     \
  };

#define KV_DEFINE_WGMMA_ELEMENT(Element, types)                                                        \
  KV_DEFINE_WGMMA(Element, types, 16, KV_D_NAMES_8, "%8", "%9", "%10", "%11", "%12", KV_D8(d, 0))      \
  KV_DEFINE_WGMMA(Element, types, 32, KV_D_NAMES_16, "%16", "%17", "%18", "%19", "%20", KV_D16(d, 0))  \
  KV_DEFINE_WGMMA(Element, types, 64, KV_D_NAMES_32, "%32", "%33", "%34", "%35", "%36", KV_D32(d, 0))  \
  KV_DEFINE_WGMMA(Element, types, 112, KV_D_NAMES_56, "%56", "%57", "%58", "%59", "%60", KV_D32(d, 0), \
                  KV_D16(d, 32), KV_D8(d, 48))                                                         \
  KV_DEFINE_WGMMA(Element, types, 128, KV_D_NAMES_64, "%64", "%65", "%66", "%67", "%68", KV_D32(d, 0), \
                  KV_D32(d, 32))

KV_DEFINE_WGMMA_ELEMENT(__half, "f16.f16")
KV_DEFINE_WGMMA_ELEMENT(__nv_bfloat16, "bf16.bf16")

#undef KV_DEFINE_WGMMA_ELEMENT
#undef KV_DEFINE_WGMMA
#undef KV_D_NAMES_64
#undef KV_D_NAMES_56
#undef KV_D_NAMES_32
#undef KV_D_NAMES_16
#undef KV_D_NAMES_8
#undef KV_D32
#undef KV_D16
#undef KV_D8

}  // namespace kv::ptx
