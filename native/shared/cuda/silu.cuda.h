// The activation of a SwiGLU layer. Device code.
#pragma once

namespace kv {

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

}  // namespace kv
