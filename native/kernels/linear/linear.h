// A linear layer:
//   output[token, out] = sum_in input[token, in] * weight[out, in]
//                        (+ bias[out]) (+ output[token, out] before, when accumulate)
// The first of two layers may gate the second, as swiglu does: output = silu(output) * the second's output.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/swiglu/swiglu.h"
#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct LinearArguments {
  // [token, in] and [token, out]; strides count elements, features are contiguous. They do not overlap.
  const void* input = nullptr;
  int64_t input_stride = 0;
  void* output = nullptr;
  int64_t output_stride = 0;
  DType dtype = DType::f32;  // of input and output
  const void* weight = nullptr;  // [out, in], as a model file stores it; read in place
  int64_t weight_stride = 0;
  bool weight_at_rest = false;  // no kernel ahead writes to it: it may be read before they end
  DType weight_dtype = DType::f32;
  const void* bias = nullptr;  // [out], or null
  DType bias_dtype = DType::f32;
  int64_t tokens = 0;
  const int32_t* rows = nullptr;  // [1], or null: how many of the first tokens are wanted; the others' output is anything
  int64_t in_features = 0;
  int64_t out_features = 0;
  bool accumulate = false;
  bool gates_next = false;  // the layer behind it in the call, of the same size: that one's output is anything afterwards
};

// Layers of the same input: its memory, dtype, tokens and features are those of each.
struct LayersOfInput {
  const LinearArguments* first;
  int64_t count;

  const LinearArguments* begin() const { return first; }
  const LinearArguments* end() const { return first + count; }
};

constexpr int64_t kMostFewRows = 16;

inline bool are_few_rows(const LinearArguments& a) { return a.tokens <= kMostFewRows; }

inline bool is_gated(const std::vector<LinearArguments>& layers) { return layers.size() == 2 && layers[0].gates_next; }

// What gates the outputs of two layers once they are there.
inline SwigluArguments swiglu_of(const LinearArguments& gate, const LinearArguments& up) {
  return {gate.output, gate.output_stride, up.output,  up.output_stride, gate.output,
          gate.output_stride, gate.dtype,  gate.tokens, gate.out_features};
}

// At least one layer, all of the same input.
Status linear(const std::vector<LinearArguments>& layers, ExecutionContext& context);

}  // namespace kv
