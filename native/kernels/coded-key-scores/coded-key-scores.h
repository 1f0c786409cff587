// Scores of queries with keys in codes (HCAttention, equation 3): of every row and query head, and every coded token of
// the row's slot,
//   scores[row, head, token] = scale * sum_g (channel_scale * q)_g . centroid_code(token, g),
// the sum in f32. A code is looked up once for all query heads that read its kv head.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/coded-keys/coded-keys.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// The table names coded blocks, of which there are `block_count`. Key counts are multiples of 64. What else the batch says
// of pools has no meaning.
struct CodedKeyScoresArguments : PagedBatch {
  CodedKeys coded;
  // Queries, [token, query_head, dim]. Strides count elements; dim is contiguous.
  const void* query = nullptr;
  int64_t query_token_stride = 0;
  int64_t query_head_stride = 0;
  DType query_dtype = DType::f32;
  int32_t query_heads = 0;  // a multiple of kv_heads
  // [token, query_head, key], key contiguous and at least 64 * table_width long. What no coded token has is not written.
  float* scores = nullptr;
  int64_t score_token_stride = 0;
  int64_t score_head_stride = 0;
  float scale = 1.0f;
};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status coded_key_scores(const CodedKeyScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
