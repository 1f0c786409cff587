// What the host checks of a mixed cache's tables on the CPU, checked on a CUDA device.
#pragma once

#include "kernels/mixed-blocks.h"
#include "kernels/paged-attention.cuda.h"

namespace kv {

// As the check of a paged cache, for both index maps: in what it leaves in `tables`, every block of the counted keys is
// inside its pool, and sparse only where the arguments allow it.
Status check_tables_cuda(const MixedAttentionArguments& arguments, const CheckedTables& tables,
                         ExecutionContext& context);

}  // namespace kv
