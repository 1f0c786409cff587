// Lists in host memory, one for each row of answers and kv head, of rows of a pool that the host reads.
#pragma once

#include <cstdint>

namespace kv {

struct RowLists {
  const int32_t* value_rows = nullptr;  // [row, kv_head, capacity]
  const int32_t* counts = nullptr;      // [row, kv_head]: 0 to capacity
  int32_t rows = 0;
  int32_t kv_heads = 0;
  int32_t group = 0;  // query heads of a kv head
  int32_t capacity = 0;
  int64_t pool_rows = 0;
  // Where a kernel says which list names a row that the pool does not have; below 0 before and if none does.
  int64_t* list_outside = nullptr;

  constexpr int64_t lists() const { return int64_t{rows} * kv_heads; }
};

}  // namespace kv
