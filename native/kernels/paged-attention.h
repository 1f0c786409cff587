// The arguments that every attention kernel over a paged cache shares.
//
// The cache is a pool of blocks, each holding `block_tokens` consecutive tokens of ONE kv head, so
// that heads may keep different tokens and different counts. Sequences name their blocks through a
// table. A contiguous tensor is the special case of one block that is as long as the tensor.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/status.h"

namespace kv {

struct PagedAttentionArguments {
  // Queries and outputs, [token, query_head, dim]; the rows of batch entry b are
  // query_start[b] .. query_start[b + 1] - 1. Strides count elements; dim is contiguous.
  const void* query = nullptr;
  int64_t query_token_stride = 0;
  int64_t query_head_stride = 0;
  DType query_dtype = DType::f32;
  void* output = nullptr;
  int64_t output_token_stride = 0;
  int64_t output_head_stride = 0;
  DType output_dtype = DType::f32;
  // [token, query_head] contiguous, or null: natural log of the sum of exponentials of the scaled scores.
  float* log_sum_exp = nullptr;

  // Pools, [block, block_token, dim]; dim is contiguous. Both pools have the same strides and dtype.
  const void* keys = nullptr;
  const void* values = nullptr;
  DType cache_dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t block_tokens = 0;

  // [slot, kv_head, table_width] block indices, and [slot, kv_head] counts of valid keys (the queries'
  // own keys included). Batch entry b reads slot `slots[b]`.
  const int32_t* block_table = nullptr;
  int32_t table_width = 0;
  const int32_t* key_counts = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* query_start = nullptr;  // [batch + 1], ascending

  int32_t batch = 0;
  int32_t query_heads = 0;
  int32_t kv_heads = 0;  // divides query_heads; query head h reads kv head h / (query_heads / kv_heads)
  int32_t head_dim = 0;
  float scale = 1.0f;
  // With causal, query i of n sees the keys 0 .. key_count - n + i of its kv head; otherwise all of them.
  // A query that sees no key gives zeros and a log-sum-exp of minus infinity.
  bool causal = true;
};

// Whether sizes and dtypes make sense together. Reads no memory that the arguments point to.
Status validate_shape(const PagedAttentionArguments& arguments);

// Whether every key count fits its table. For devices whose memory the host reads.
Status validate_counts(const PagedAttentionArguments& arguments);

}  // namespace kv
