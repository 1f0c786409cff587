// Means of the values of a kv head, from its first block of 64 tokens to each of its blocks, in the order of the list:
//   sums[to[i]] = sums[before[i]] + sum over tokens of values[from[i]],   nothing before where before[i] < 0
//   means[to[i]] = sums[to[i]] / (64 counts[i])
// A block goes on from the one that the list has in front of it, or from one that the list does not have. Sums are f32,
// token by token, so every device makes the same bytes.
#pragma once

#include <cstdint>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

constexpr int32_t kSummedBlockTokens = 64;

struct RunningMeansArguments {
  // [block, block_token 64, dim]. Strides count elements, dims are contiguous.
  const void* values = nullptr;
  DType dtype = DType::f32;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int32_t head_dim = 0;
  float* sums = nullptr;  // [value_block, dim] contiguous
  void* means = nullptr;  // [value_block, dim] contiguous, of the dtype of `values`
  const int32_t* from = nullptr;    // [sum]: blocks of values
  const int32_t* to = nullptr;      // [sum]: none twice
  const int32_t* before = nullptr;  // [sum]
  const int32_t* counts = nullptr;  // [sum]: blocks of the sum, 1 or more
  int32_t length = 0;               // of the list

  // Whether a block of the list goes on from the one in front of it.
  constexpr bool goes_on(int32_t i) const { return i > 0 && before[i] == to[i - 1]; }
};

Status running_means(const RunningMeansArguments& arguments, ExecutionContext& context);

}  // namespace kv
