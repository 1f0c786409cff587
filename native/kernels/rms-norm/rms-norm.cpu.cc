#include "kernels/rms-norm/rms-norm.h"

#include <cmath>

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class T>
float mean_square(const T* row, int64_t features) {
  Vec total = {};
  int64_t i = 0;
  for (; i + kLanes <= features; i += kLanes) {
    const Vec x = load(row + i);
    total += x * x;
  }
  float sum = horizontal_sum(total);
  for (; i < features; ++i) sum += to_float(row[i]) * to_float(row[i]);
  return sum / static_cast<float>(features);
}

template <class T, class W>
void normalise_row(const T* input, const W* weight, T* output, int64_t features, float epsilon) {
  const float scale = 1.0f / std::sqrt(mean_square(input, features) + epsilon);
  int64_t i = 0;
  for (; i + kLanes <= features; i += kLanes) store(output + i, load(input + i) * scale * load(weight + i));
  for (; i < features; ++i) from_float(output + i, to_float(input[i]) * scale * to_float(weight[i]));
}

template <class T, class W>
void normalise(const RmsNormArguments& a, Workers& workers) {
  const T* input = static_cast<const T*>(a.input);
  T* output = static_cast<T*>(a.output);
  workers.for_each(static_cast<size_t>(a.outer), [&](size_t index, int) {
    const int64_t row = static_cast<int64_t>(index);
    for (int64_t head = 0; head < a.inner; ++head) {
      normalise_row(input + row * a.input_outer_stride + head * a.input_inner_stride,
                    static_cast<const W*>(a.weight),
                    output + row * a.output_outer_stride + head * a.output_inner_stride, a.features, a.epsilon);
    }
  });
}

}  // namespace

void rms_norm(const RmsNormArguments& a, Workers& workers) {
  with_float_type(a.dtype, [&](auto element) {
    with_float_type(a.weight_dtype, [&](auto weight) {
      normalise<decltype(element), decltype(weight)>(a, workers);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
