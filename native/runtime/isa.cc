#include "runtime/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kv {
#if defined(__x86_64__)
namespace {

// __builtin_cpu_supports knows F16C only from GCC 11 on. Whether the system saves the registers is part of the check
// for "avx2".
bool supports_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

Isa best_isa() {
#if defined(__x86_64__)
  // The same features as in isa_flags of CMakeLists.txt, which compiles the kernels.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !supports_f16c()) return Isa::baseline;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  return Isa::avx2;
#else
  return Isa::baseline;
#endif
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace kv
