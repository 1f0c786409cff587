// Copies blocks of a pool within the pool:
//   pool[to[i]] = pool[from[i]]   for every i.
// A block is `block_bytes` contiguous bytes.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct CopyBlocksArguments {
  void* pool = nullptr;  // [block, block_bytes]
  int64_t block_bytes = 0;
  // Both name blocks of the pool. No block of `to` occurs twice or in `from`, so the order of the copies does not
  // matter.
  const int32_t* from = nullptr;  // [copies]
  const int32_t* to = nullptr;    // [copies]
  int32_t copies = 0;
};

Status copy_blocks(const CopyBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
