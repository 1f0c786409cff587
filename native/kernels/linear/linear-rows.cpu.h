// What the products of `linear` share: which of them multiplies, packed input rows, and writing the results.
#pragma once

#include "kernels/linear/linear.h"
#include "shared/cpu/partial-loads.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

// Copies `rows` rows of the input, from `row` on, to [in / kLanes, row, lane] in f32, with zeros after the
// last feature.
inline void pack_rows(const LinearArguments& a, int64_t row, int64_t rows, float* packed) {
  with_float_type(a.dtype, [&](auto element) {
    const auto* input = static_cast<const decltype(element)*>(a.input) + row * a.input_stride;
    for (int64_t k = 0; k < a.in_features; k += kLanes) {
      for (int64_t i = 0; i < rows; ++i, packed += kLanes) {
        store(packed, load_up_to(input + i * a.input_stride + k, a.in_features - k));
      }
    }
  });
}

// output[row, out .. out + count] = sums (+ bias) (+ itself)
template <class T>
inline void write_sums(const LinearArguments& a, int64_t row, int64_t out, int64_t count, const float* sums,
                       const float* bias) {
  T* output = static_cast<T*>(a.output) + row * a.output_stride + out;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec sum = load(sums + i) + load(bias + i);
    store(output + i, a.accumulate ? load(output + i) + sum : sum);
  }
  for (; i < count; ++i) {
    const float sum = sums[i] + bias[i];
    from_float(output + i, a.accumulate ? to_float(output[i]) + sum : sum);
  }
}

// bias[out .. out + count] in f32; zeros when there is none.
inline void read_bias(const LinearArguments& a, int64_t out, int64_t count, float* bias) {
  for (int64_t i = 0; i < count; ++i) bias[i] = 0;
  if (a.bias == nullptr) return;
  with_float_type(a.bias_dtype, [&](auto element) {
    const auto* source = static_cast<const decltype(element)*>(a.bias) + out;
    for (int64_t i = 0; i < count; ++i) bias[i] = to_float(source[i]);
  });
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
