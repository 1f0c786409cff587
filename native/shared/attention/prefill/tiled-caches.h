// Which caches prefill attention multiplies on tile registers.
#pragma once

#include "runtime/execution.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// The head dimensions of a tile's row.
constexpr int32_t kTiledDims = 32;

// With the instruction set that prefill attention runs on: AVX-512 in place of AMX unless keys and values are one bf16
// part each, in whole rows of tiles. So it is the same for dense, listed and 2:4 blocks of a cache.
inline ExecutionContext for_prefill(const PagedAttentionArguments& a, ExecutionContext context) {
  const bool tiled = a.cache_dtype == DType::bf16 && a.head_dim % kTiledDims == 0;
  if (context.isa == Isa::amx && !tiled) context.isa = Isa::avx512;
  return context;
}

}  // namespace kv
