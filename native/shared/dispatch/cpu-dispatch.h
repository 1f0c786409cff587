// Declares the builds of one CPU kernel and picks among them.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"

// KV_CPU_KERNEL declares a kernel's builds, KV_TILED_CPU_KERNEL those of one that is also built for tile registers.
#if defined(__x86_64__)
#define KV_CPU_KERNEL(name, Arguments) KV_CPU_KERNEL_OF(name, Arguments, avx512)
#if defined(KV_AMX)
#define KV_TILED_CPU_KERNEL(name, Arguments) KV_CPU_KERNEL_OF(name, Arguments, amx)
#else
#define KV_TILED_CPU_KERNEL(name, Arguments) KV_CPU_KERNEL(name, Arguments)
#endif
// `tiled` is the build that runs for Isa::amx.
#define KV_CPU_KERNEL_OF(name, Arguments, tiled)                           \
  namespace baseline {                                                     \
  void name(const Arguments&, Workers&);                                   \
  }                                                                        \
  namespace avx2 {                                                         \
  void name(const Arguments&, Workers&);                                   \
  }                                                                        \
  namespace avx512 {                                                       \
  void name(const Arguments&, Workers&);                                   \
  }                                                                        \
  namespace tiled {                                                        \
  void name(const Arguments&, Workers&);                                   \
  }                                                                        \
  static void name##_cpu(const Arguments& arguments, const ExecutionContext& context) { \
    switch (context.isa) {                                                 \
      case Isa::amx:                                                       \
        return tiled::name(arguments, context.workers);                    \
      case Isa::avx512:                                                    \
        return avx512::name(arguments, context.workers);                   \
      case Isa::avx2:                                                      \
        return avx2::name(arguments, context.workers);                     \
      default:                                                             \
        return baseline::name(arguments, context.workers);                 \
    }                                                                      \
  }
#else
#define KV_TILED_CPU_KERNEL(name, Arguments) KV_CPU_KERNEL(name, Arguments)
#define KV_CPU_KERNEL(name, Arguments)                                     \
  namespace baseline {                                                     \
  void name(const Arguments&, Workers&);                                   \
  }                                                                        \
  static void name##_cpu(const Arguments& arguments, const ExecutionContext& context) { \
    baseline::name(arguments, context.workers);                            \
  }
#endif
