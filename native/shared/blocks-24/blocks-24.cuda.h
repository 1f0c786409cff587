// Checks the tables of a cache with 2:4 blocks on a CUDA device, where the host cannot read them.
#pragma once

#include "shared/blocks-24/blocks-24.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {

// Like the check of a paged cache, but for both index maps. In the resulting `tables`, every block of the counted
// keys is inside its pool, and is sparse only where the arguments allow it.
Status check_tables_cuda(const Attention24Arguments& arguments, const CheckedTables& tables,
                         ExecutionContext& context);

// Gives a cache without sparse blocks to the kernels of a paged cache. Index maps count blocks from 1, so they become
// plain block tables of pools that begin one block earlier. Nobody reads block 0 of such a pool.
inline PagedAttentionArguments as_plain_cache(const Attention24Arguments& mixed) {
  PagedAttentionArguments plain = mixed;
  const int64_t block_bytes = mixed.block_stride * 2;
  plain.keys = static_cast<const char*>(mixed.keys) - block_bytes;
  plain.values = static_cast<const char*>(mixed.values) - block_bytes;
  plain.block_count += 1;
  return plain;
}

}  // namespace kv
