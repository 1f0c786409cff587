// What operations that compute scores of queries with coded keys share.
#pragma once

#include "shared/paged/paged-attention.h"

namespace kv {

// The table names blocks of 64 keys in codes, of which there are `block_count`. Key counts are multiples of 64. What else
// the batch says of pools has no meaning.
struct KeyScoresArguments : PagedBatch {
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

}  // namespace kv
