// Says that a cache of plan-blocks has none of the blocks of some sequences: where[block] = -1 for each that holds tokens.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

// Of all slots of the tables, which name host blocks.
struct ForgetBlocksArguments {
  const int32_t* block_table = nullptr;  // [slot, kv_head, table_width]
  const int32_t* key_counts = nullptr;   // [slot, kv_head]: tokens
  int32_t slot_count = 0;
  int32_t kv_heads = 0;
  int32_t table_width = 0;
  int32_t block_tokens = 0;
  int32_t* where = nullptr;  // [host_block]
  int32_t block_count = 0;
};

// Refuses tables and counts that lead outside (invalid_value).
Status forget_blocks(const ForgetBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
