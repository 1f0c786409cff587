// Launchers of observation scores on CUDA devices. They take checked tables (paged-attention.cuda.h), enqueue on
// `stream` and return.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/observation-scores/observation-scores.h"
#include "runtime/status.h"

namespace kv {

// The statistics of one query of one head over some keys: `sum` is the sum of 2^(scale * log2(e) * score -
// reference).
struct alignas(8) RowStatistics {
  float reference;
  float sum;
};

constexpr int kBlocksOfMultiprocessor = 4;  // without tensor cores

// The keys of a kv head are cut into `parts`, one for each thread block.
struct ObservationScoresLaunch {
  int parts = 1;
  RowStatistics* statistics = nullptr;  // [part, query_head, query_token]
  float* log_sums = nullptr;            // [query_head, query_token]: log2 of the denominators
  FaultSink faults = {};
  cudaStream_t stream = nullptr;
};

// The first pass over the keys fills `statistics`. These are merged into `log_sums`. The second pass then writes the
// scores, and reports scores that have no room. Any dtype, head size and number of queries.
Status gather_statistics(const ObservationScoresArguments& arguments, const ObservationScoresLaunch& launch);
Status add_up_weights(const ObservationScoresArguments& arguments, const ObservationScoresLaunch& launch);

namespace sm90a {

// What the tensor-core kernels take: queries and cache of the same 16-bit dtype, heads of 64 or 128 dims, rows at
// multiples of 16 bytes, and blocks of a multiple of 8 tokens. The maximum over heads needs at most 128 queries.
bool fits_observation_scores(const ObservationScoresArguments& arguments);
Status gather_statistics(const ObservationScoresArguments& arguments, const ObservationScoresLaunch& launch);
Status add_up_weights(const ObservationScoresArguments& arguments, const ObservationScoresLaunch& launch);

}  // namespace sm90a
}  // namespace kv
