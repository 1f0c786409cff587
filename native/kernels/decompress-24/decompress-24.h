// Writes sparse blocks of keys or values as dense blocks, with zeros for what is not kept: the inverse of compress-24
// (HieraSparse, section III-B).
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

struct Decompress24Arguments {
  KvOperand operand = KvOperand::keys;
  DType dtype = DType::f16;  // or bf16
  int32_t head_dim = 0;      // 64 or 128
  SparseBlocks24 sparse;
  const int32_t* ids = nullptr;  // [block]: the sparse blocks to read
  int32_t count = 0;
  const int32_t* places = nullptr;  // [block]: the dense blocks to write
  void* dense = nullptr;            // [block, block_token 64, dim]
  int32_t dense_count = 0;
};

// Refuses other dtypes and head sizes (capability), and ids and places that are out of range (invalid_value).
Status decompress_24(const Decompress24Arguments& arguments, ExecutionContext& context);

}  // namespace kv
