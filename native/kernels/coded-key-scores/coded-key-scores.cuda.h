// Launchers of scores from codes on CUDA devices. They enqueue on `stream` and return. Faults of the tables are reported
// through `faults`, and nothing is read there.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/coded-key-scores/coded-key-scores.h"
#include "runtime/fault.h"

namespace kv::cuda {

// Queries of 16 bits and 64 or 128 dims, one book of all groups with sub-vectors of 2 or 4 dims, codes of 8, 12, 13 or 16
// bits. Rows of scores, and books, begin at multiples of 16 bytes.
bool fits_coded_key_scores(const CodedKeyScoresArguments& arguments);

// Takes what fits_coded_key_scores accepts.
Status coded_key_scores(const CodedKeyScoresArguments& arguments, FaultSink faults, cudaStream_t stream);

// Takes everything.
Status coded_key_scores_any(const CodedKeyScoresArguments& arguments, FaultSink faults, cudaStream_t stream);

}  // namespace kv::cuda
