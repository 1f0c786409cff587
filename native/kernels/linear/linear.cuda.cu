#include "kernels/linear/linear-cublas-lt.cuda.h"
#include "kernels/linear/linear-few-rows.cuda.h"
#include "kernels/linear/linear-output.cuda.h"
#include "kernels/linear/linear-skinny.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

// Elements of a 16-byte load.
template <class W>
constexpr int kVector = 16 / static_cast<int>(sizeof(W));

template <class W>
struct alignas(16) Vector {
  W element[kVector<W>];
};

// One warp makes one output feature of kTokens rows, so that a weight is read once for all of them. Takes whatever
// the other kernels do not.
template <class T, class W, int kTokens, bool kAligned>
__global__ void __launch_bounds__(kThreads) multiply_any(LinearArguments a, int64_t first) {
  const int64_t out = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (out >= a.out_features) return;
  const W* weight = static_cast<const W*>(a.weight) + out * a.weight_stride;
  const T* input = static_cast<const T*>(a.input) + first * a.input_stride;
  float sums[kTokens] = {};
  if constexpr (kAligned) {
    constexpr int kStep = kWarp * kVector<W>;
#pragma unroll 4
    for (int64_t i = lane * kVector<W>; i < a.in_features; i += kStep) {
      const auto weights = *reinterpret_cast<const Vector<W>*>(weight + i);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const T* row = input + token * a.input_stride + i;
#pragma unroll
        for (int e = 0; e < kVector<W>; ++e) sums[token] += to_float(weights.element[e]) * to_float(row[e]);
      }
    }
  } else {
    for (int64_t i = lane; i < a.in_features; i += kWarp) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        sums[token] += to_float(weight[i]) * to_float(input[token * a.input_stride + i]);
      }
    }
  }
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    const float sum = warp_sum(sums[token]);
    if (lane == 0) write_sum<T>(a, first + token, out, sum, before_sum<T>(a, first + token, out));
  }
}

template <class T, class W, int kTokens>
void launch(const LinearArguments& a, int64_t first, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((a.out_features * kWarp + kThreads - 1) / kThreads);
  const bool aligned = reinterpret_cast<uintptr_t>(a.weight) % 16 == 0 && a.weight_stride % kVector<W> == 0 &&
                       a.in_features % kVector<W> == 0;
  if (aligned) {
    multiply_any<T, W, kTokens, true><<<blocks, kThreads, 0, stream>>>(a, first);
  } else {
    multiply_any<T, W, kTokens, false><<<blocks, kThreads, 0, stream>>>(a, first);
  }
}

Status linear_of_any(const LinearArguments& a, ExecutionContext& context) {
  with_cuda_float_type(a.dtype, [&](auto element) {
    with_cuda_float_type(a.weight_dtype, [&](auto weight) {
      using T = decltype(element);
      using W = decltype(weight);
      int64_t token = 0;
      for (; token + 4 <= a.tokens; token += 4) launch<T, W, 4>(a, token, stream_of(context));
      for (; token < a.tokens; ++token) launch<T, W, 1>(a, token, stream_of(context));
    });
  });
  return launch_status();
}

Status linear_skinny(const LinearLayers& layers, ExecutionContext& context) {
  const size_t bytes = sm90a::linear_skinny_workspace(layers);
  void* workspace = bytes == 0 ? nullptr : context.workspace(bytes);
  if (bytes > 0 && workspace == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for the parts of a linear layer's rows");
  }
  return sm90a::linear_skinny(layers, workspace, stream_of(context));
}

// Whether weights, biases and outputs of `next` lie behind those of `a`, as if they were of one layer.
bool continues(const LinearArguments& a, const LinearArguments& next) {
  const auto behind = [](const void* data, int64_t elements, DType dtype) {
    return static_cast<const char*>(data) + elements * static_cast<int64_t>(byte_size(dtype));
  };
  const void* const bias = a.bias == nullptr ? nullptr : behind(a.bias, a.out_features, a.bias_dtype);
  return a.weight_dtype == next.weight_dtype && a.weight_stride == next.weight_stride &&
         a.output_stride == next.output_stride && a.bias_dtype == next.bias_dtype && bias == next.bias &&
         behind(a.weight, a.out_features * a.weight_stride, a.weight_dtype) == next.weight &&
         behind(a.output, a.out_features, a.dtype) == next.output;
}

// Layers that all fit the same of the two kernels.
Status linear_together(const LinearLayers& layers, ExecutionContext& context) {
  return fits_skinny(layers.layers[0]) ? linear_skinny(layers, context) : linear_few_rows(layers, stream_of(context));
}

// Whether the kernel of few rows multiplies and gates, with the bits of swiglu behind it.
bool gates_itself(const LinearArguments& gate, const LinearArguments& up) {
  const auto fits = [](const LinearArguments& a) { return a.dtype == a.weight_dtype && fits_few_rows(a); };
  return fits(gate) && fits(up) && gate.weight_stride == up.weight_stride && gate.tokens > 0 && gate.out_features > 0 &&
         gate.tokens <= count_few_rows(gate);
}

}  // namespace

Status linear_cuda(const std::vector<LinearArguments>& layers, ExecutionContext& context) {
  const bool gated = is_gated(layers);
  if (gated) {
    const LinearLayers both{{layers[0], layers[1]}, 2, true};
    if (gates_itself(layers[0], layers[1])) return linear_few_rows(both, stream_of(context));
    if (fits_skinny_gated(layers[0], layers[1])) return linear_skinny(both, context);
  }
  Status status;
  LinearLayers together;
  const auto launch_together = [&] {
    if (together.count > 0 && status.ok()) status = linear_together(together, context);
    together.count = 0;
  };
  for (size_t i = 0; i < layers.size() && status.ok(); ++i) {
    LinearArguments a = layers[i];
    if (a.tokens == 0 || a.out_features == 0) continue;
    const bool skinny = fits_skinny(a);
    if (!skinny && a.tokens > count_few_rows(a) && cublas_lt_multiplies(a)) {
      // One product of many outputs takes less than several of few.
      while (i + 1 < layers.size() && continues(a, layers[i + 1])) a.out_features += layers[++i].out_features;
      status = linear_cublas_lt(a, context);
    } else if (!skinny && !fits_few_rows(a)) {
      status = linear_of_any(a, context);
    } else {
      const bool differs = together.count > 0 && (together.layers[0].weight_dtype != a.weight_dtype ||
                                                  fits_skinny(together.layers[0]) != skinny);
      if (differs || together.count == LinearLayers::kMost) launch_together();
      together.layers[together.count++] = a;
    }
  }
  launch_together();
  return gated && status.ok() ? swiglu(swiglu_of(layers[0], layers[1]), context) : status;
}

}  // namespace kv
