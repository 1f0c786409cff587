#include "runtime/first-cache.h"

#include <unistd.h>

namespace kv {
namespace {

constexpr int64_t kLeast = 8 << 10;  // no processor has less; a virtual machine may say anything
constexpr int64_t kUsual = 32 << 10;

}  // namespace

int64_t first_cache_bytes() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  static const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);  // asked once: a virtual machine answers slowly
  if (bytes >= kLeast) return bytes;
#endif
  return kUsual;
}

}  // namespace kv
