// Block scores from sums along antidiagonals (XAttention). With the stride S, S rows of a tile are one strided row R, and
// S keys one strided key C. For query head h:
//   logit[R, C] = scale / S * sum over i < S of q[h, S R + S - 1 - i] . k[S C + i]
//   share[R, C] = softmax over the strided keys C whose first key is no later than the first query of R
//   score[h, I, J] = ln(mean over the strided rows R of tile I of the sum of share[R, C] over the strided keys C of block J)
// Rows and keys beyond the last count as zeros.
#pragma once

#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {

struct AntidiagonalBlockScoresArguments : PrefillBlockScoresArguments {
  int32_t stride = 8;  // 8 or 16
};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status antidiagonal_block_scores(const AntidiagonalBlockScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
