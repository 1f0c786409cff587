// What the host checks of a cache with 2:4 blocks's tables on the CPU, checked on a CUDA device.
#pragma once

#include "shared/blocks-24/blocks-24.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {

// As the check of a paged cache, for both index maps: in what it leaves in `tables`, every block of the counted keys is
// inside its pool, and sparse only where the arguments allow it.
Status check_tables_cuda(const Attention24Arguments& arguments, const CheckedTables& tables,
                         ExecutionContext& context);

// A cache without sparse blocks as the kernels of a paged cache take it. Index maps count blocks from 1: they are plain
// tables of pools that begin one block earlier, whose block 0 nobody reads.
inline PagedAttentionArguments as_plain_cache(const Attention24Arguments& mixed) {
  PagedAttentionArguments plain = mixed;
  const int64_t block_bytes = mixed.block_stride * 2;
  plain.keys = static_cast<const char*>(mixed.keys) - block_bytes;
  plain.values = static_cast<const char*>(mixed.values) - block_bytes;
  plain.block_count += 1;
  return plain;
}

}  // namespace kv
