// The order in which CUDA kernels work off the query tiles of lists: batch entry, then kv head, so that tiles handed out
// together share keys in L2; and of one kv head the longest list first, so that the last tiles end together.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/block-sparse-attention/block-sparse-attention.h"
#include "shared/attention/work-tile.cuda.h"

namespace kv {

// Its `key_tiles` are pairs of listed blocks.
struct alignas(16) ListedTile : PrefillTile {
  int listed;  // blocks
  const int32_t* blocks;
  // Where the runs of the last key tile begin, and of the one before it; key_count for a run that has no keys.
  int last_first_keys[2][2];
};

struct ListedPlan {
  const ListedTile* tiles = nullptr;
  const int32_t* count = nullptr;  // of the tiles
};

struct ListedArguments : PagedAttentionArguments {
  ListedPlan plan;
};

// The plan's numbering of the work tiles.
class ListedWork {
 public:
  using Tile = ListedTile;

  __device__ explicit ListedWork(const ListedArguments& arguments) : plan_(arguments.plan) {}

  // False when `number` is past the last tile.
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

// Plans in `memory`, of listed_plan_bytes. Tables and lists of the arguments were checked.
Status plan_listed_tiles(const BlockSparseAttentionArguments& arguments, void* memory, cudaStream_t stream,
                         ListedPlan* plan);

}  // namespace kv
