// Scores of queries with keys in codes (HCAttention, equation 3): of every row and query head, and every coded token of
// the row's slot,
//   scores[row, head, token] = scale * sum_g (channel_scale * q)_g . centroid_code(token, g),
// the sum in f32. A code is looked up once for all query heads that read its kv head.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/coded-keys/coded-keys.h"
#include "shared/key-scores/key-scores.h"

namespace kv {

struct CodedKeyScoresArguments : KeyScoresArguments {
  CodedKeys coded;
};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status coded_key_scores(const CodedKeyScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
