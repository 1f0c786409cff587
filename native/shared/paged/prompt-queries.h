// Rows of a prompt whose attention is estimated from the keys of the cache.
#pragma once

#include "shared/paged/paged-attention.h"

namespace kv {

// The batch must have one entry, whose rows are the last of its sequence. The keys of these rows are counted.
struct PromptQueries : PagedBatch {
  // [token, query_head, dim], after RoPE. Strides count elements; dim is contiguous.
  const void* query = nullptr;
  int64_t query_token_stride = 0;
  int64_t query_head_stride = 0;
  DType query_dtype = DType::f32;
  int32_t query_heads = 0;  // a multiple of kv_heads
  const void* keys = nullptr;  // the pool
  float scale = 1;

  constexpr int32_t group() const { return query_heads / kv_heads; }
};

// Refuses sizes and dtypes that contradict each other, and other batches (invalid_value, capability). Reads no table.
Status validate_sizes(const PromptQueries& queries);

}  // namespace kv
