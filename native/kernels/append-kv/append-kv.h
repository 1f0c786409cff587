// Appends the keys and values of new tokens to those that the cache holds, and counts them. Numbers are rounded to
// the cache's dtype (to nearest even). Tokens that are already in the cache never move.
//   key_pool[block(c + i), (c + i) % block_tokens] = keys[query_start[b] + i, h],   c = key_counts[slots[b], h],
// and the same for values. Queries and keys may be turned by their positions before. Then key_counts[slots[b], h] grows by the number of the entry's rows.
#pragma once

#include "kernels/rope/rope.h"
#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"

namespace kv {

struct AppendKvArguments : PagedBatch {
  // New rows, [token, kv_head, dim]. Strides count elements and are the same for keys and values; dim is contiguous.
  const void* keys = nullptr;
  const void* values = nullptr;
  int64_t row_token_stride = 0;
  int64_t row_head_stride = 0;
  DType row_dtype = DType::f32;

  void* key_pool = nullptr;
  void* value_pool = nullptr;

  bool turns = false;           // rope first turns these in place, at the same positions:
  RopeArguments turned_queries;  // [token, query_head, dim]
  RopeArguments turned_keys;     // `keys`
};

enum class AppendKvFault : int32_t {
  slot_twice = static_cast<int32_t>(PagedFault::operations_own),  // value: the slot
};

std::string describe_append_kv_fault(const Fault& fault);

// Refuses rows that do not fit into the slot's blocks, a slot that two entries with rows name, and tables with
// numbers out of range, before it writes anything (invalid_value). Refuses dtypes other than f32, f16 and bf16
// (capability).
Status append_kv(const AppendKvArguments& arguments, ExecutionContext& context);

// The turn alone.
Status turn_rows(const AppendKvArguments& arguments, ExecutionContext& context);

}  // namespace kv
