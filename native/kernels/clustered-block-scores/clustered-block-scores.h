// Block scores from clusters of the keys of each block. In the block J the first seed is the key farthest from the mean
// key, and each further one the key farthest from its nearest seed. A key belongs to the cluster of its nearest seed;
// cluster c has n[c] keys, and mean[c] is their mean. For query head h:
//   logit[i, J] = max over c of (scale q[h, i] . mean[c] + ln n[c])
//   share[i, J] = softmax over the blocks J whose first key row i sees
//   score[h, I, J] = ln(mean of share[i, J] over every second row i of tile I, its first row included)
#pragma once

#include "shared/prefill-block-scores/prefill-block-scores.h"

namespace kv {

// Of a block; those behind its last key are empty.
constexpr int32_t kKeyClusters = 8;
// One of so many rows is scored.
constexpr int32_t kScoredRowStep = 2;
constexpr int32_t kScoredRowsOfTile = kScoredTileRows / kScoredRowStep;

struct ClusteredBlockScoresArguments : PrefillBlockScoresArguments {};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status clustered_block_scores(const ClusteredBlockScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
