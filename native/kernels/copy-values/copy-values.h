// Copies blocks of values to a pool in host memory, as they are or in codes of 8 bits a number:
//   pool[to[i]] = values[from[i]]   for every i.
// A code is its number divided by the scale of its token, rounded to the nearest integer, ties to even. The scale is the
// token's largest magnitude / 127, rounded up to bf16. A token with a number that is not finite has the scale NaN.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

constexpr int32_t kCopiedBlockTokens = 64;

struct CopyValuesArguments {
  // [block, block_token 64, dim]. Strides count elements, dims are contiguous.
  const void* values = nullptr;
  DType dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t head_dim = 0;
  void* pool = nullptr;         // [value_block, 64, dim] contiguous, of the dtype of `values` or, with scales, i8
  uint16_t* scales = nullptr;   // bf16 [value_block, 64], or null
  // Blocks. None of `to` occurs twice.
  const int32_t* from = nullptr;  // [copies]
  const int32_t* to = nullptr;    // [copies]
  int32_t copies = 0;
};

Status copy_values(const CopyValuesArguments& arguments, ExecutionContext& context);

}  // namespace kv
