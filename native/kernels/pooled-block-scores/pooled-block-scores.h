// Block scores from the mean key of each block (FlashPrefill). For query head h, a tile I of rows and a block J of keys:
//   energy[I, J] = sum of exp(scale q[h, i] . mean of k[j] over j in J) over the rows i of I that see the block's first key
//   score[h, I, J] = ln(energy[I, J] / sum of energy[I, J'] over all blocks J')
#pragma once

#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {

struct PooledBlockScoresArguments : PrefillBlockScoresArguments {};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status pooled_block_scores(const PooledBlockScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
