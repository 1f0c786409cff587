// d += a * b by one warp in f64. a is [16, 8], b is [8, 8] and d is [16, 8]. With t = l % 4, lane l holds the elements
// (l / 4, t), (l / 4 + 8, t), (l / 4, t + 4) and (l / 4 + 8, t + 4) of a, and (t, l / 4) and (t + 4, l / 4) of b. Of d it
// holds (l / 4, 2 * t + {0, 1}) and (l / 4 + 8, the same columns).
#pragma once

namespace kv::ptx {

__device__ inline void mma_m16n8k8(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
  for (int part = 0; part < 4; ++part) {
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+d"(d[part % 2 * 2]), "+d"(d[part % 2 * 2 + 1])
                 : "d"(a[part]), "d"(b[part / 2]));
  }
#endif
}

}  // namespace kv::ptx
