// The linear layer of few rows on CUDA devices.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/linear/linear.h"

namespace kv {

// Whether linear_few_rows takes these dtypes and layouts: weights of 16 bits, and rows of input and weights that
// start at multiples of 16 bytes and hold a multiple of eight features.
bool fits_few_rows(const LinearArguments& arguments);

// Layers of one input and one dtype of weights, that launch together.
struct LinearLayers {
  static constexpr int kMost = 4;
  LinearArguments layers[kMost];
  int count = 0;
  // The first of two layers, whose weights have one stride, gates the second: its output becomes silu(itself) * the
  // second's, which is not written. Input and weights have one dtype.
  bool gated = false;

  // How many layers' outputs thread blocks divide among themselves: what is gated goes with its gate.
  __host__ __device__ int divided() const { return gated ? 1 : count; }

  bool weights_at_rest() const {
    return std::all_of(layers, layers + count, [](const LinearArguments& layer) { return layer.weight_at_rest; });
  }
};

// Up to so many rows of this layer, there is nothing faster.
int64_t count_few_rows(const LinearArguments& arguments);

// Any number of rows, 16 in a pass where they have the weights' dtype, else eight.
Status linear_few_rows(const LinearLayers& layers, cudaStream_t stream);

}  // namespace kv
