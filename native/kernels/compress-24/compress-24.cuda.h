// The steps of compress-24 on a CUDA device, in the order in which they are enqueued.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/compress-24/compress-24.h"

namespace kv {

// Where a block was and where it goes, as entries of the map: dense block place - 1 is compressed into sparse block
// -(to + 1), or moved to dense block to - 1; with 0 it stays.
struct BlockMove {
  int32_t place;
  int32_t to;
};

// What is done to each block of each pruning's range; in device memory, between the steps of one call.
struct PruningPlan {
  BlockMove* blocks = nullptr;  // [pruning, most_blocks]
  int32_t* vacated = nullptr;  // [pruning, most_blocks]: dense blocks that blocks which stay dense move to
  uint32_t* losses = nullptr;  // [pruning, most_blocks]: bits of f32, of dense blocks
  int32_t* ranks = nullptr;    // [pruning]: 1 where losses decide
  int32_t* moves = nullptr;    // [pruning]: 1 where blocks move
};

// All steps; `workspace` has pruning_plan_bytes(arguments).
Status enqueue_compress_24(const Compress24Arguments& arguments, void* workspace, FaultSink faults,
                           cudaStream_t stream);

size_t pruning_plan_bytes(const Compress24Arguments& arguments);
PruningPlan pruning_plan(const Compress24Arguments& arguments, void* memory);

// Plans the prunings of which every dense block becomes sparse, and those that have nothing to do, and writes the map;
// says which others need losses. Reports prunings that lead outside, which then do nothing.
Status plan_whole_prunings(const Compress24Arguments& arguments, const PruningPlan& plan, FaultSink faults,
                           cudaStream_t stream);
Status compute_pruning_losses(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream);
// The same for the prunings that losses decide.
Status plan_ranked_prunings(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream);
// Carry out the plan.
Status compress_blocks(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream);
Status move_blocks(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream);

}  // namespace kv
