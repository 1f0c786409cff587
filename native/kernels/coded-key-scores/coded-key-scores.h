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
  // [row, query_head, range_parts, 2], or null: the least and the largest score of each part of a row and head's tokens,
  // which parts are the device's choice. A part without tokens has infinity and minus infinity. The largest one is NaN
  // where a score is, and the least one then has no meaning. Rows that no batch entry has are not written.
  float* ranges = nullptr;
  int32_t range_parts = 0;  // at least 1 where there are ranges

  constexpr float* ranges_of(int64_t row, int32_t head) const { return ranges + (row * query_heads + head) * range_parts * 2; }
};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status coded_key_scores(const CodedKeyScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
