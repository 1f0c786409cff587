// Sums the values that lists name, on the host (HCAttention Eq. 5), for each row and query head:
//   output = sum_i weights[i] values[value_rows[i]].
// It is a host part of its stream: all its memory is the host's. A row of values is read once for all query heads of its
// kv head.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct WeightedValuesArguments {
  const int32_t* value_rows = nullptr;  // [row, kv_head, capacity]
  const float* weights = nullptr;       // [row, kv_head, capacity, group_head]
  const int32_t* counts = nullptr;      // [row, kv_head]: 0 to capacity
  int32_t rows = 0;
  int32_t kv_heads = 0;
  int32_t group = 0;  // query heads of a kv head
  int32_t capacity = 0;
  const void* values = nullptr;  // [pool_rows, dim] contiguous
  DType dtype = DType::f32;      // or f16, bf16, i8, whose codes count as whole numbers
  int64_t pool_rows = 0;
  int32_t head_dim = 0;
  float* output = nullptr;  // [row, query_head, dim] contiguous; zeros without tokens
  // Where the kernel says which list names a row that the pool does not have; below 0 before and if none does.
  int64_t* list_outside = nullptr;
};

// Counts and rows out of range end in invalid_value when the host part runs.
Status weighted_values(const WeightedValuesArguments& arguments, ExecutionContext& context);

}  // namespace kv
