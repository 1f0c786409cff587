// The arguments that all kernels over a paged cache share.
//
// The cache is a pool of blocks. Each block holds `block_tokens` consecutive tokens of ONE kv head, so that heads may
// keep different tokens and different counts. A table names the blocks of each sequence. A contiguous tensor is a
// special case: one block that is as long as the tensor.
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
  int32_t query_tokens = 0;        // rows of the row tensors: at least query_start[batch]
  const int32_t* slots = nullptr;  // [batch]: batch entry b is the sequence of slot slots[b]

  // Pools, [block, block_token, dim]. Strides count elements; dim is contiguous. The pools of keys and of values have
  // the same strides and dtype.
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
  // [token, query_head] contiguous, or null. The natural logarithm of the sum of exp(scaled score).
  float* log_sum_exp = nullptr;

  // The pools. Key counts include the queries' own keys, which are already in the cache.
  const void* keys = nullptr;
  const void* values = nullptr;

  int32_t query_heads = 0;  // a multiple of kv_heads; query head h reads kv head h / (query_heads / kv_heads)
  float scale = 1.0f;
  // With causal, query i of n sees the keys 0 .. key_count - n + i of its kv head; otherwise it sees all keys. A
  // query that sees no key gets zeros and a log-sum-exp of minus infinity.
  bool causal = true;
};

// Checks that sizes and dtypes fit together. Reads no memory that the arguments point to.
Status validate_sizes(const PagedBatch& batch);
Status validate_sizes(const PagedAttentionArguments& arguments);

// Checks that the batch's rows ascend within the row tensors, and that its slots exist. Reads the tables, so it is
// for devices whose memory the host reads.
Status validate_rows(const PagedBatch& batch);

// Checks that starts, slots, counts and blocks are inside their tensors, so that no index in the tables is out of
// range. The slot of an entry without rows is not read. With `appending`, the checked blocks are those of the batch's
// rows after the counted keys; otherwise they are those of the counted keys.
Status validate_tables(const PagedBatch& batch, bool appending);

// Checks that the blocks of the batch's entries with rows have room for their counted keys. Rows must be valid.
Status validate_counts(const PagedBatch& batch);

// Checks that the counted keys of the batch's entries with rows are whole blocks. The tables must be valid.
Status validate_whole_blocks(const PagedBatch& batch);

// The most keys that a kv head of an entry with rows counts. Reads the tables, which must be valid.
int32_t most_keys(const PagedBatch& batch);

}  // namespace kv
