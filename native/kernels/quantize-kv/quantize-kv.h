// Writes dense blocks of keys and values as quantized blocks:
//   quantized[to[i]] = Q(dense[from[i]])   for every i, of keys and of values.
// Q rotates every row of a token and rounds it to codes of 8, 4, 3 or 2 bits, as quantized-blocks.h says.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct QuantizeKvArguments {
  // Dense blocks, [block, block_token 64, dim]. Strides count elements, dims are contiguous. Values may be null, here and
  // there: keys are written alone then.
  const void* keys = nullptr;
  const void* values = nullptr;
  DType dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t head_dim = 0;  // 1 to 512
  // Quantized blocks, [quantized_block, byte].
  uint8_t* quantized_keys = nullptr;
  uint8_t* quantized_values = nullptr;
  int32_t key_bits = 8;  // or 4, 3, 2
  int32_t value_bits = 8;
  bool rotated = true;
  // Blocks of the pools. None of `to` occurs twice.
  const int32_t* from = nullptr;  // [copies]
  const int32_t* to = nullptr;    // [copies]
  int32_t copies = 0;
};

// Refuses other bits and head sizes (capability).
Status quantize_kv(const QuantizeKvArguments& arguments, ExecutionContext& context);

}  // namespace kv
