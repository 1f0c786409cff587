#include "runtime/first-cache.h"

#include <unistd.h>

namespace kv {

int64_t first_cache_bytes() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  static const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);  // asked once: a virtual machine answers slowly
  if (bytes > 0) return bytes;
#endif
  return 32 << 10;
}

}  // namespace kv
