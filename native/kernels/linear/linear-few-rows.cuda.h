// The linear layer of few rows on CUDA devices.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/linear/linear.h"

namespace kv {

// Rows that one pass over the weights serves.
constexpr int kFewRows = 8;

// Whether linear_few_rows takes these dtypes and layouts: weights of 16 bits, and rows of input and weights that
// start at multiples of 16 bytes and hold a multiple of eight features.
bool fits_few_rows(const LinearArguments& arguments);

// Layers of one input and one dtype of weights, that launch together.
struct LinearLayers {
  static constexpr int kMost = 4;
  LinearArguments layers[kMost];
  int count = 0;
};

// Any number of rows, eight in a pass.
Status linear_few_rows(const LinearLayers& layers, cudaStream_t stream);

}  // namespace kv
