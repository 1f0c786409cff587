// Sums the values that lists name, on the host (HCAttention Eq. 5), for each row and query head:
//   output = sum_i weights[i] values[value_rows[i]].
// It is a host part of its stream: all its memory is the host's. A row of values is read once for all query heads of its
// kv head.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/row-lists/row-lists.h"

namespace kv {

struct WeightedValuesArguments : RowLists {
  const float* weights = nullptr;  // [row, kv_head, capacity, group_head]
  const void* values = nullptr;    // [pool_rows, dim] contiguous
  DType dtype = DType::f32;        // or f16, bf16, i8, whose codes count as whole numbers
  int32_t head_dim = 0;
  float* output = nullptr;  // [row, query_head, dim] contiguous; zeros without tokens
};

// Counts and rows out of range end in invalid_value when the host part runs.
Status weighted_values(const WeightedValuesArguments& arguments, ExecutionContext& context);

}  // namespace kv
