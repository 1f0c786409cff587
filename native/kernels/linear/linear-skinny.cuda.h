// The linear layer of some tens of rows on Hopper.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/linear/linear-few-rows.cuda.h"

namespace kv {

// Whether linear_skinny computes this layer on the calling thread's device, and sooner than what else there is.
bool fits_skinny(const LinearArguments& layer);
// Whether it also gates, with the bits of swiglu behind it.
bool fits_skinny_gated(const LinearArguments& gate, const LinearArguments& up);

namespace sm90a {

// Bytes of device memory that a launch needs; what they hold does not matter.
size_t linear_skinny_workspace(const LinearLayers& layers);

Status linear_skinny(const LinearLayers& layers, void* workspace, cudaStream_t stream);

}  // namespace sm90a
}  // namespace kv
