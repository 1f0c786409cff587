// Checks a batch's tables on a CUDA device, where the host cannot read them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Copies of a batch's tables in device memory, with every number in range. Rows and keys that are out of range are
// left out.
struct CheckedTables {
  int32_t* query_start = nullptr;
  int32_t* slots = nullptr;
  int32_t* key_counts = nullptr;  // only of slots that the batch names

  // `memory` holds checked_tables_bytes(batch) bytes, 4-byte aligned.
  CheckedTables(const PagedBatch& batch, void* memory);
};

// A multiple of 256, so that other working memory may follow.
size_t checked_tables_bytes(const PagedBatch& batch);

// Fills `tables` from the batch's own tables. If a number there is out of range, a fault is reported to the stream.
Status check_tables_cuda(const PagedBatch& batch, const CheckedTables& tables, ExecutionContext& context,
                         bool looks_without_rows = false, bool whole_blocks = false);

// The batch with its tables replaced by `tables`.
template <class Arguments>
Arguments with_tables(Arguments arguments, const CheckedTables& tables) {
  arguments.query_start = tables.query_start;
  arguments.slots = tables.slots;
  arguments.key_counts = tables.key_counts;
  return arguments;
}

}  // namespace kv
