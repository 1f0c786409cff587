// The arguments that every kernel over a paged cache shares.
//
// The cache is a pool of blocks, each holding `block_tokens` consecutive tokens of ONE kv head, so
// that heads may keep different tokens and different counts. Sequences name their blocks through a
// table. A contiguous tensor is the special case of one block that is as long as the tensor.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/status.h"

namespace kv {

// Which rows belong to which sequence, and where the sequence's keys and values lie.
struct PagedBatch {
  int32_t batch = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  // [batch + 1], ascending: the rows of batch entry b are query_start[b] .. query_start[b + 1] - 1.
  const int32_t* query_start = nullptr;
  int32_t query_tokens = 0;        // rows that the row tensors have: at least query_start[batch]
  const int32_t* slots = nullptr;  // [batch]: batch entry b is the sequence of slot slots[b]

  // Pools, [block, block_token, dim]; strides count elements; dim is contiguous. The pools of keys and of
  // values have the same strides and dtype.
  DType cache_dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t block_tokens = 0;
  int32_t block_count = 0;

  // [slot, kv_head, table_width] block indices, and [slot, kv_head] counts of valid keys.
  const int32_t* block_table = nullptr;
  int32_t table_width = 0;
  int32_t* key_counts = nullptr;
  int32_t slot_count = 0;
};

struct PagedAttentionArguments : PagedBatch {
  // Queries and outputs, [token, query_head, dim]. Strides count elements; dim is contiguous.
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

  // The pools. Key counts include the queries' own keys, which are in the cache already.
  const void* keys = nullptr;
  const void* values = nullptr;

  int32_t query_heads = 0;  // a multiple of kv_heads; query head h reads kv head h / (query_heads / kv_heads)
  float scale = 1.0f;
  // With causal, query i of n sees the keys 0 .. key_count - n + i of its kv head; otherwise all of them.
  // A query that sees no key gives zeros and a log-sum-exp of minus infinity.
  bool causal = true;
};

// Whether sizes and dtypes make sense together. Reads no memory that the arguments point to.
Status validate_sizes(const PagedBatch& batch);
Status validate_sizes(const PagedAttentionArguments& arguments);

// Whether the batch's rows ascend within the row tensors and its slots exist. Reads the tables: for devices whose
// memory the host reads.
Status validate_rows(const PagedBatch& batch);

// Whether starts, slots, counts and blocks stay inside their tensors, so that no index of the tables leads outside.
// Of the slot of an entry without rows nothing is read.
// With `appending`, the blocks are those of the batch's rows behind the counted keys; else those of the counted keys.
Status validate_tables(const PagedBatch& batch, bool appending);

}  // namespace kv
