// Rotary position embedding (Su et al. 2021, eq. 34). At position m, pair i of a head is rotated by the angle m *
// frequency_i:
//   (a, b) -> (a cos - b sin, b cos + a sin) * attention_scale
// Pair i is (x[i], x[i + pairs]) for split halves, and (x[2i], x[2i + 1]) if interleaved.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

enum class RopeConvention { half_split, interleaved };

struct RopeArguments {
  // [token, head, dim]; strides count elements, dims are contiguous.
  const void* input = nullptr;
  int64_t input_token_stride = 0;
  int64_t input_head_stride = 0;
  void* output = nullptr;  // may be the input itself
  int64_t output_token_stride = 0;
  int64_t output_head_stride = 0;
  DType dtype = DType::f32;  // of input and output
  const int32_t* positions = nullptr;  // [token]
  const float* inverse_frequencies = nullptr;  // [pair], radians a position
  int64_t tokens = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t pairs = 0;  // 2 * pairs <= head_dim; the dims after them are not rotated
  RopeConvention convention = RopeConvention::half_split;
  float attention_scale = 1;
};

Status rope(const RopeArguments& arguments, ExecutionContext& context);

}  // namespace kv
