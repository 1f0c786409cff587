// Copies blocks of one pool onto blocks of another, which may lie in another memory:
//   destination[to[i]] = source[from[i]]   for every i.
// A block is `block_bytes` contiguous bytes.
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct TransferBlocksArguments {
  const void* source = nullptr;  // [block, block_bytes]
  void* destination = nullptr;   // [block, block_bytes]
  bool from_host = false;        // whether the source is in host memory, and the device another
  bool to_host = false;          // whether the destination is; not both
  int64_t block_bytes = 0;
  // In host memory. No block of `to` occurs twice, so the order of the copies does not matter.
  const int32_t* from = nullptr;  // [copies]
  const int32_t* to = nullptr;    // [copies]
  int32_t copies = 0;
};

Status transfer_blocks(const TransferBlocksArguments& arguments, ExecutionContext& context);

}  // namespace kv
