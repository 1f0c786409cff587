// The two kernel launches of compress-24 on a CUDA device.
#pragma once

#include <cuda_runtime.h>

#include "kernels/compress-24/compress-24.h"

namespace kv {

// What happens to one block, in entries of the map. The block of `dense` is compressed into that of `sparse`; then the
// block of `refill` is copied to its place, unless `refill` is negative. If `sparse` names a dense block, nothing happens.
struct alignas(16) BlockPlan {
  int32_t dense = 0;
  int32_t sparse = 0;
  int32_t refill = -1;
};

// The plan of all prunings. It is in device memory and lives between the launches of one call.
struct PruningPlan {
  BlockPlan* blocks = nullptr;   // [pruning, most_blocks]
  int32_t* vacated = nullptr;    // [pruning, most_blocks]: blocks whose dense places are filled again
  uint32_t* losses = nullptr;    // [pruning, most_blocks]: losses of dense blocks, as bits of f32
  unsigned* arrivals = nullptr;  // [pruning]: thread blocks that have computed their losses; 0 before and after
};

// `counters` has pruning_counter_bytes(arguments), all zero before and after. `workspace` has pruning_plan_bytes.
Status enqueue_compress_24(const Compress24Arguments& arguments, void* counters, void* workspace, FaultSink faults,
                           cudaStream_t stream);

inline int64_t planned_blocks(const Compress24Arguments& arguments) {
  return int64_t{arguments.pruning_count} * arguments.most_blocks;
}

size_t pruning_counter_bytes(const Compress24Arguments& arguments);
size_t pruning_plan_bytes(const Compress24Arguments& arguments);
PruningPlan pruning_plan(const Compress24Arguments& arguments, void* counters, void* workspace);

__device__ inline uint16_t* dense_block(const Compress24Arguments& arguments, int32_t number) {
  return static_cast<uint16_t*>(arguments.dense) + int64_t{number} * kBlock24Tokens * arguments.head_dim;
}

__device__ inline const uint8_t* mask_of(const Compress24Arguments& arguments, const Pruning& pruning) {
  const int kv_head = pruning.table_row % arguments.kv_heads;
  return arguments.element_mask + int64_t{kv_head} * kBlock24Tokens * arguments.head_dim;
}

// Decides what happens to each block, and writes the map. A pruning with numbers out of range is reported and does
// nothing.
Status plan_prunings(const Compress24Arguments& arguments, const PruningPlan& plan, FaultSink faults,
                     cudaStream_t stream);

}  // namespace kv
