// Block scores from the vertical and slash lines of the attention map (MInference). The lines are those that the last 64
// rows of the call see, or all rows if there are fewer. For query head h, W such rows and their exact attention a:
//   vertical[h, j] = 1 / W * sum of a[i, j] over the rows i
//   slash[h, l] = 1 / W * sum of a[i, i - l] over the rows i
//   score[h, I, J] = ln(the largest vertical[h, j] or slash[h, l] of a line that crosses tile I and block J)
// A tile counts as one of 128 rows here, even if it has fewer. Attention below 2^-126 counts as nothing.
#pragma once

#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {

struct VerticalSlashBlockScoresArguments : PrefillBlockScoresArguments {};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status vertical_slash_block_scores(const VerticalSlashBlockScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
