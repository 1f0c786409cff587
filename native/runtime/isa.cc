#include "runtime/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(KV_AMX)
#include <sys/syscall.h>
#include <unistd.h>
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

// AMX aside.
static Isa best_vectors() {
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

#if defined(KV_AMX)
static AmxState find_amx() {
  if (best_vectors() < Isa::avx512 || !__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) {
    return AmxState::absent;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? AmxState::ready : AmxState::refused;
}
#else
static AmxState find_amx() { return AmxState::absent; }
#endif

AmxState amx_state() {
  static const AmxState found = find_amx();
  return found;
}

Isa best_isa() { return amx_state() == AmxState::ready ? Isa::amx : best_vectors(); }

bool runs(Isa isa) { return isa <= best_isa(); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::amx:
      return "amx";
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace kv
