// Attention of rows of answers over the keys and values that lists name, on the host. For each row and query head, and the
// rows r_i of the pool that the list of its kv head names:
//   s_i = scale q . k[r_i],   l = log(sum_i e^s_i),   output = sum_i e^(s_i - l) v[r_i]
// It is a host part of its stream: all its memory is the host's. A row of keys and one of values are read once for all
// query heads of their kv head.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/row-lists/row-lists.h"

namespace kv {

struct DecodeAttentionListedArguments : RowLists {
  const void* query = nullptr;  // [row, query_head, dim]; strides count elements, dims are contiguous
  DType query_dtype = DType::f32;
  int64_t query_row_stride = 0;
  int64_t query_head_stride = 0;
  const void* keys = nullptr;  // [pool_rows, dim] contiguous
  DType key_dtype = DType::f32;
  const void* values = nullptr;      // [pool_rows, dim] contiguous
  DType value_dtype = DType::f32;    // or f16, bf16, i8
  const uint16_t* value_scales = nullptr;  // bf16 [pool_rows]: what a code of i8 values stands for; or null, for 1
  int32_t head_dim = 0;
  float scale = 1;
  float* output = nullptr;  // [row, query_head, dim] contiguous; zeros without tokens
  // [row, query_head]: what the lists were chosen by, then l; minus infinity without tokens. A NaN stays, and makes the
  // output of its row and head NaN.
  float* log_sum_exp = nullptr;
};

// Counts and rows out of range end in invalid_value when the host part runs.
Status decode_attention_listed(const DecodeAttentionListedArguments& arguments, ExecutionContext& context);

}  // namespace kv
