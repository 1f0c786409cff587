// Scores of queries with full blocks of keys, from what block-metadata says of them:
//   score[t, h, block] = max over the query heads of kv head h of bound(q, block)
//   bound = sum over dims of q * mean                     (one vector)
//   bound = sum over dims of max(q * low, q * high)       (two vectors: a box)
// Both are a dot product with an expanded query: q itself, or min(q, 0) for the low ends and max(q, 0) for the high ones.
//
// Every device makes the same bits. The products of a block are cut into chunks of kScoreChunk. Lane l of kScoreLanes sums
// those of the chunks l, l + kScoreLanes, ... in order; then lanes are added in pairs, those furthest apart first.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

constexpr int32_t kScoreChunk = 8;
constexpr int32_t kScoreLanes = 32;

// The table names blocks of metadata. The batch's cache dtype, block count and block stride are those of the metadata, and
// its block tokens those of a block of keys.
struct BlockScoresArguments : PagedBatch {
  // Queries, [token, query_head, dim]. Strides count elements; dim is contiguous.
  const void* query = nullptr;
  int64_t query_token_stride = 0;
  int64_t query_head_stride = 0;
  DType query_dtype = DType::f32;
  int32_t query_heads = 0;         // a multiple of kv_heads
  const void* metadata = nullptr;  // [metadata_block, vector, dim] contiguous
  int32_t vectors = 0;             // 1 or 2
  // [token, kv_head, block], block contiguous and at least table_width long. Scores of other than full blocks are not
  // written.
  float* scores = nullptr;
  int64_t score_token_stride = 0;
  int64_t score_head_stride = 0;

  constexpr int32_t products() const { return vectors * head_dim; }
};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status block_scores(const BlockScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
