// Root-mean-square normalisation over the last axis (Zhang & Sennrich 2019, eq. 4):
//   output[r, i] = input[r, i] / sqrt(mean_j input[r, j]^2 + epsilon) * weight[i]
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct RmsNormArguments {
  // [outer, inner, feature]; strides count elements, features are contiguous. A plain [token, hidden] tensor has
  // inner = 1. The norm of each head of [token, head, dim] uses both.
  const void* input = nullptr;
  int64_t input_outer_stride = 0;
  int64_t input_inner_stride = 0;
  void* output = nullptr;  // may be the input itself
  int64_t output_outer_stride = 0;
  int64_t output_inner_stride = 0;
  DType dtype = DType::f32;  // of input and output
  const void* weight = nullptr;  // [feature]
  DType weight_dtype = DType::f32;
  int64_t outer = 0;
  int64_t inner = 1;
  int64_t features = 0;
  float epsilon = 1e-5f;
};

Status rms_norm(const RmsNormArguments& arguments, ExecutionContext& context);

}  // namespace kv
