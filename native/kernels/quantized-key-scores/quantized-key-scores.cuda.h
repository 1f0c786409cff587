// Launchers of scores from quantized blocks on CUDA devices. They enqueue on `stream` and return. Faults of the tables are
// reported through `faults`, and nothing is read there.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/quantized-key-scores/quantized-key-scores.h"
#include "runtime/fault.h"

namespace kv::cuda {

// Queries of 16 bits and 64 or 128 dims. Rows of scores begin at multiples of 8 bytes.
bool fits_quantized_key_scores(const QuantizedKeyScoresArguments& arguments);

// Takes what fits_quantized_key_scores accepts.
Status quantized_key_scores(const QuantizedKeyScoresArguments& arguments, FaultSink faults, cudaStream_t stream);

// Takes everything.
Status quantized_key_scores_any(const QuantizedKeyScoresArguments& arguments, FaultSink faults, cudaStream_t stream);

}  // namespace kv::cuda
