// Attention over all keys, from attention over some of them and over the others (Flash-Decoding, Dao et al. 2023). With
// outputs o1, o2 and the logarithms of their softmaxes' denominators l1, l2, for each row and head:
//   l = log(e^l1 + e^l2),   o = e^(l1 - l) o1 + e^(l2 - l) o2
// A part that has seen no key has minus infinity, and adds nothing: the other one's numbers are the result.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct MergeAttentionArguments {
  // [token, query_head, dim]; strides count elements, dims are contiguous. Holds o1, then o.
  void* output = nullptr;
  int64_t output_token_stride = 0;
  int64_t output_head_stride = 0;
  DType dtype = DType::f32;
  float* log_sum_exp = nullptr;  // [token, query_head]: l1, then l
  const void* other = nullptr;   // o2, laid out likewise
  int64_t other_token_stride = 0;
  int64_t other_head_stride = 0;
  DType other_dtype = DType::f32;
  const float* other_log_sum_exp = nullptr;  // l2
  int64_t tokens = 0;
  int64_t query_heads = 0;
  int64_t head_dim = 0;
};


Status merge_attention(const MergeAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
