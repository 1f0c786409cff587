// Checks the tables of a cache with 2:4 blocks on a CUDA device, where the host cannot read them.
#pragma once

#include "shared/blocks-24/blocks-24.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {

// Like the check of a paged cache, but for both index maps. In the resulting `tables`, every block of the counted
// keys is inside its pool, and is sparse only where the arguments allow it.
Status check_tables_cuda(const Attention24Arguments& arguments, const CheckedTables& tables,
                         ExecutionContext& context);

}  // namespace kv
