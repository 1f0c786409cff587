// The products of a warpgroup with a block of 64 keys or values that is dense or 2:4 sparse, for N query rows (sm_90a):
// S^T = K Q^T and O^T += V^T P^T, of which d is [64, N] in f32. Device code.
//
// The choice between dense and sparse lies inside of one piece of PTX. Branches around the products would make the
// compiler move accumulators at their ends, and so wait for each product.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kv::sm90a {

#define KV_D8(d, i)                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KV_D32(d) KV_D8(d, 0), KV_D8(d, 8), KV_D8(d, 16), KV_D8(d, 24)
#define KV_D48(d) KV_D32(d), KV_D8(d, 32), KV_D8(d, 40)
#define KV_NAMES_32                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KV_NAMES_48 \
  KV_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"

// One product. Its operands begin `a_step` and `b_step` times 16 bytes later than their descriptors say. `across` is 1
// if their rows run across the sum. 0x40000040 is the upper half of the descriptors that ptx::wgmma_operand makes.
#define KV_DENSE(types, N, names, a_step, b_step, accumulate, across)                                           \
  "add.u32 low, dense, " #a_step ";\n"                                                                          \
  "mov.b64 a, {low, 0x40000040};\n"                                                                             \
  "add.u32 low, right, " #b_step ";\n"                                                                          \
  "mov.b64 b, {low, 0x40000040};\n"                                                                             \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" names "}, a, b, " #accumulate ", 1, 1, " #across \
  ", " #across ";\n"
#define KV_SPARSE(types, N, names, a_step, b_step, metadata, half, accumulate, across)                   \
  "add.u32 low, non_zeros, " #a_step ";\n"                                                               \
  "mov.b64 a, {low, non_zeros_high};\n"                                                                  \
  "add.u32 low, right, " #b_step ";\n"                                                                   \
  "mov.b64 b, {low, 0x40000040};\n"                                                                      \
  "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." types " {" names "}, a, b, " #metadata ", " #half \
  ", " #accumulate ", 1, 1, " #across ", " #across ";\n"

// Issues one of two lists of products as a group of wgmma. The numbers A to F are those of the operands KV_OPERANDS,
// which follow the accumulators.
#define KV_CHOICE(A, B, C, D, E, F, sparse_products, dense_products)                 \
  "{\n"                                                                              \
  ".reg .pred is_sparse, always, never;\n"                                           \
  ".reg .b64 a, b;\n"                                                                \
  ".reg .b32 low, high, non_zeros, non_zeros_high, dense, right, first, second;\n"   \
  "mov.b64 {non_zeros, non_zeros_high}, %" #A ";\n"                                  \
  "mov.b64 {dense, high}, %" #B ";\n"                                                \
  "mov.b64 {right, high}, %" #C ";\n"                                                \
  "setp.ne.b32 is_sparse, %" #D ", 0;\n"                                             \
  "mov.b32 first, %" #E ";\n"                                                        \
  "mov.b32 second, %" #F ";\n"                                                       \
  "setp.eq.b32 always, 0, 0;\n"                                                      \
  "setp.ne.b32 never, 0, 0;\n"                                                       \
  "@!is_sparse bra.uni products_of_dense;\n"                                         \
  "wgmma.fence.sync.aligned;\n" sparse_products "wgmma.commit_group.sync.aligned;\n" \
  "bra.uni done;\n"                                                                  \
  "products_of_dense:\n"                                                             \
  "wgmma.fence.sync.aligned;\n" dense_products "wgmma.commit_group.sync.aligned;\n"  \
  "done:\n"                                                                          \
  "}"
#define KV_CHOICE_64(sparse_products, dense_products) \
  KV_CHOICE(32, 33, 34, 35, 36, 37, sparse_products, dense_products)
#define KV_CHOICE_96(sparse_products, dense_products) \
  KV_CHOICE(48, 49, 50, 51, 52, 53, sparse_products, dense_products)
#define KV_OPERANDS(first_metadata, second_metadata) \
  "l"(non_zeros), "l"(dense), "l"(right), "r"(static_cast<int>(sparse)), "r"(first_metadata), "r"(second_metadata)

// Products of the 64 dims of a panel.
#define KV_SPARSE_KEYS(types, N, names, a, b, metadata, accumulate) \
  KV_SPARSE(types, N, names, a, b, metadata, 0, accumulate, 0)      \
  KV_SPARSE(types, N, names, a + 2, b + 4, metadata, 1, always, 0)
#define KV_DENSE_KEYS(types, N, names, a, b, accumulate) \
  KV_DENSE(types, N, names, a, b, accumulate, 0)         \
  KV_DENSE(types, N, names, a + 2, b + 2, always, 0)     \
  KV_DENSE(types, N, names, a + 4, b + 4, always, 0)     \
  KV_DENSE(types, N, names, a + 6, b + 6, always, 0)

// `panel` is the distance of panels of query rows in units of 16 bytes.
#define KV_DEFINE_PRODUCTS(Element, types, N, names, accumulators, panel)                                     \
  template <>                                                                                                 \
  struct BlockProducts24<Element, N> {                                                                        \
    static __device__ __forceinline__ void keys(float (&d)[N / 2], uint64_t non_zeros, uint64_t dense,        \
                                                uint64_t right, bool sparse, const uint32_t (&metadata)[1]) { \
      asm volatile(KV_CHOICE_##N(KV_SPARSE_KEYS(types, N, names, 0, 0, first, never),                         \
                                 KV_DENSE_KEYS(types, N, names, 0, 0, never))                                 \
                   : accumulators(d)                                                                          \
                   : KV_OPERANDS(metadata[0], 0));                                                            \
    }                                                                                                         \
    static __device__ __forceinline__ void keys(float (&d)[N / 2], uint64_t non_zeros, uint64_t dense,        \
                                                uint64_t right, bool sparse, const uint32_t (&metadata)[2]) { \
      asm volatile(KV_CHOICE_##N(KV_SPARSE_KEYS(types, N, names, 0, 0, first, never)                          \
                                     KV_SPARSE_KEYS(types, N, names, 4, panel, second, always),               \
                                 KV_DENSE_KEYS(types, N, names, 0, 0, never)                                  \
                                     KV_DENSE_KEYS(types, N, names, 512, panel, always))                      \
                   : accumulators(d)                                                                          \
                   : KV_OPERANDS(metadata[0], metadata[1]));                                                  \
    }                                                                                                         \
    static __device__ __forceinline__ void values(float (&d)[N / 2], uint64_t non_zeros, uint64_t dense,      \
                                                  uint64_t right, bool sparse, uint32_t metadata) {           \
      asm volatile(KV_CHOICE_##N(KV_SPARSE(types, N, names, 0, 0, first, 0, always, 1)                        \
                                     KV_SPARSE(types, N, names, 128, 256, first, 1, always, 1),               \
                                 KV_DENSE(types, N, names, 0, 0, always, 1)                                   \
                                     KV_DENSE(types, N, names, 128, 128, always, 1)                           \
                                         KV_DENSE(types, N, names, 256, 256, always, 1)                       \
                                             KV_DENSE(types, N, names, 384, 384, always, 1))                  \
                   : accumulators(d)                                                                          \
                   : KV_OPERANDS(metadata, 0));                                                               \
    }                                                                                                         \
  };

// The operands are descriptors: of the block as non-zeros, of the same memory as a dense block, and of the rows. Each
// call is a group of wgmma, and fences.
//   keys()    d = keys times queries, summed over the panels of 64 dims that metadata are given for. The operands have
//             rows along the sum.
//   values()  d += a panel of 64 dims of values times weights, summed over 64 keys. The operands have rows across the
//             sum.
template <typename Element, int N>
struct BlockProducts24;

KV_DEFINE_PRODUCTS(__half, "f16.f16", 64, KV_NAMES_32, KV_D32, 512)
KV_DEFINE_PRODUCTS(__nv_bfloat16, "bf16.bf16", 64, KV_NAMES_32, KV_D32, 512)
KV_DEFINE_PRODUCTS(__half, "f16.f16", 96, KV_NAMES_48, KV_D48, 768)
KV_DEFINE_PRODUCTS(__nv_bfloat16, "bf16.bf16", 96, KV_NAMES_48, KV_D48, 768)

#undef KV_DEFINE_PRODUCTS
#undef KV_DENSE_KEYS
#undef KV_SPARSE_KEYS
#undef KV_OPERANDS
#undef KV_CHOICE_96
#undef KV_CHOICE_64
#undef KV_CHOICE
#undef KV_SPARSE
#undef KV_DENSE
#undef KV_NAMES_48
#undef KV_NAMES_32
#undef KV_D48
#undef KV_D32
#undef KV_D8

}  // namespace kv::sm90a
