// Writes the keys and values of new tokens behind those that the cache holds, rounded to the cache's dtype
// (to nearest even), and counts them. Tokens that are there already never move.
//   key_pool[block(c + i), (c + i) % block_tokens] = keys[query_start[b] + i, h],   c = key_counts[slots[b],
//   h],
// and the same for values; then key_counts[slots[b], h] grows by the entry's rows.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct AppendKvArguments {
  // New rows, [token, kv_head, dim]; those of batch entry b are query_start[b] .. query_start[b + 1] - 1.
  // Strides count elements and hold for both; dim is contiguous.
  const void* keys = nullptr;
  const void* values = nullptr;
  int64_t row_token_stride = 0;
  int64_t row_head_stride = 0;
  DType row_dtype = DType::f32;

  // The cache, as in PagedAttentionArguments.
  void* key_pool = nullptr;
  void* value_pool = nullptr;
  DType cache_dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t block_tokens = 0;
  const int32_t* block_table = nullptr;
  int32_t table_width = 0;
  int32_t* key_counts = nullptr;
  const int32_t* slots = nullptr;  // no slot twice
  const int32_t* query_start = nullptr;

  int32_t batch = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
};

// Refuses rows that do not fit the slot's blocks, and blocks that are not there (a negative index), before
// it writes anything (invalid_value); dtypes other than f32, f16 and bf16 (capability).
Status append_kv(const AppendKvArguments& arguments, ExecutionContext& context);

}  // namespace kv
