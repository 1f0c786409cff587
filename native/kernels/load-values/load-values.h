// Writes blocks of values of a pool in host memory as dense blocks, the reverse of copy-values:
//   values[to[i]] = pool[from[i]]   for every i; codes of 8 bits times the scale of their token.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

constexpr int32_t kLoadedBlockTokens = 64;

struct LoadValuesArguments {
  const void* pool = nullptr;        // [value_block, 64, dim] contiguous, of the dtype of `values` or, with scales, i8
  const uint16_t* scales = nullptr;  // bf16 [value_block, 64], or null
  // [block, block_token 64, dim]. Strides count elements, dims are contiguous.
  void* values = nullptr;
  DType dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t head_dim = 0;
  // Blocks. None of `to` occurs twice.
  const int32_t* from = nullptr;  // [copies]
  const int32_t* to = nullptr;    // [copies]
  int32_t copies = 0;
};

Status load_values(const LoadValuesArguments& arguments, ExecutionContext& context);

}  // namespace kv
