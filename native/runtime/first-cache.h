// The first cache of a core, through which kernels pass what they read often.
#pragma once

#include <cstdint>

namespace kv {

// Its bytes for data, at least 8 KiB. 32 KiB where the system does not say.
int64_t first_cache_bytes();

}  // namespace kv
