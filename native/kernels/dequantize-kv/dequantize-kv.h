// Writes quantized blocks of keys and values as dense blocks, the reverse of quantize-kv:
//   dense[to[i]] = the rows of quantized[from[i]], rotated back if they are rotated   for every i, of keys and of values.
// The rows are f32 until the end, where they round once to the type of the dense blocks.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct DequantizeKvArguments {
  // Quantized blocks, [quantized_block, byte], as quantized-blocks.h says. Values may be null, here and there: keys are
  // written alone then.
  const uint8_t* quantized_keys = nullptr;
  const uint8_t* quantized_values = nullptr;
  int32_t key_bits = 8;  // or 4, 3, 2
  int32_t value_bits = 8;
  bool rotated = true;
  // Dense blocks, [block, block_token 64, dim]. Strides count elements, dims are contiguous.
  void* keys = nullptr;
  void* values = nullptr;
  DType dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t head_dim = 0;  // 1 to 512
  // Blocks of the pools. None of `to` occurs twice.
  const int32_t* from = nullptr;  // [copies]
  const int32_t* to = nullptr;    // [copies]
  int32_t copies = 0;
};

// Refuses other bits and head sizes (capability).
Status dequantize_kv(const DequantizeKvArguments& arguments, ExecutionContext& context);

}  // namespace kv
