// Keeps the selected tokens of one slot. They move to the front of the slot's blocks, in the same order:
//   key_pool[block(i), i % block_tokens] = key_pool[block(j), j % block_tokens],   j = indices[h, i],
// and the same for values. Then key_counts[h] is the number of kept tokens.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-faults.h"

namespace kv {

struct GatherKvArguments {
  // The cache, as in PagedAttentionArguments. Any dtype, because elements are only moved.
  void* key_pool = nullptr;
  void* value_pool = nullptr;
  DType cache_dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t block_tokens = 0;
  int32_t block_count = 0;
  const int32_t* block_table = nullptr;  // the slot's row, [kv_head, table_width]
  int32_t table_width = 0;
  int32_t* key_counts = nullptr;  // the slot's row, [kv_head]

  const int32_t* indices = nullptr;  // [kv_head, kept], each row strictly ascending
  int64_t index_stride = 0;
  const int32_t* counts = nullptr;  // [kv_head], how many indices of each row are valid
  int32_t* outcomes = nullptr;      // [kv_head], 1 for a refused selection, else 0; if null, a refusal fails the stream

  int32_t kv_heads = 0;
  int32_t head_dim = 0;
};

enum class GatherKvFault : int32_t {
  selection_not_ascending = static_cast<int32_t>(PagedFault::operations_own),  // value: the kv head
};

std::string describe_gather_kv_fault(const Fault& fault);

// Refuses indices that do not ascend or that the slot does not hold, and tables that name blocks outside the pool,
// before anything is moved (invalid_value). With `outcomes`, a refused kv head keeps its first tokens instead, as
// many as it was to keep.
Status gather_kv(const GatherKvArguments& arguments, ExecutionContext& context);

}  // namespace kv
