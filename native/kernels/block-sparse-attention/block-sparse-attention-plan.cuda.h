// The plan says in which order CUDA kernels take the query tiles. Batch entries and kv heads come one after another, so
// that tiles that run together share keys in L2. Within a kv head the longest list comes first, so that the last tiles
// end at about the same time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/block-sparse-attention/block-sparse-attention.h"
#include "shared/attention/work-tile.cuda.h"

namespace kv {

// All that a kernel needs to know of one work tile. `key_tiles` counts pairs of listed blocks.
struct alignas(16) ListedTile : PrefillTile {
  int listed;             // how many blocks the list has
  const int32_t* blocks;  // the list
  // The first keys of both runs of the last key tile, and of the key tile before it; key_count if a run has no keys.
  int last_first_keys[2][2];
};

struct ListedPlan {
  const ListedTile* tiles = nullptr;
  const int32_t* count = nullptr;  // one number: how many tiles there are
};

struct ListedArguments : PagedAttentionArguments {
  ListedPlan plan;
};

// Numbers the work tiles as the plan does.
class ListedWork {
 public:
  using Tile = ListedTile;

  __device__ explicit ListedWork(const ListedArguments& arguments) : plan_(arguments.plan) {}

  // Returns false if `number` is past the last tile.
  __device__ bool find(int64_t number, ListedTile* tile) const {
    if (number >= *plan_.count) return false;
    *tile = plan_.tiles[number];
    return true;
  }

 private:
  const ListedPlan& plan_;
};

// A multiple of 256.
size_t listed_plan_bytes(const PagedAttentionArguments& arguments);

// Makes the plan in `memory`, which holds listed_plan_bytes. The tables and lists of the arguments must be checked
// before.
Status plan_listed_tiles(const BlockSparseAttentionArguments& arguments, void* memory, cudaStream_t stream,
                         ListedPlan* plan);

}  // namespace kv
