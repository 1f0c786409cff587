// Which shapes the tensor-core kernels of attention take. Host code.
#pragma once

#include <cstdint>

#include "shared/paged/paged-attention.h"

namespace kv {

// Queries, cache and output have the same 16-bit dtype. Heads have 64 or 128 dims. Blocks have a multiple of
// `block_multiple` tokens. Rows begin at multiples of 16 bytes.
inline bool fits_tensor_cores(const PagedAttentionArguments& arguments, int block_multiple) {
  const DType dtype = arguments.cache_dtype;
  if (dtype != DType::f16 && dtype != DType::bf16) return false;
  if (arguments.query_dtype != dtype || arguments.output_dtype != dtype) return false;
  if (arguments.head_dim != 64 && arguments.head_dim != 128) return false;
  if (arguments.block_tokens % block_multiple != 0 || !(arguments.scale > 0.0f)) return false;
  for (const void* data :
       {arguments.query, static_cast<const void*>(arguments.output), arguments.keys, arguments.values}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  }
  for (const int64_t stride :
       {arguments.query_token_stride, arguments.query_head_stride, arguments.output_token_stride,
        arguments.output_head_stride, arguments.token_stride, arguments.block_stride}) {
    if (stride % 8 != 0) return false;
  }
  return true;
}

}  // namespace kv
