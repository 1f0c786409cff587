// The shared memory of a thread block of the Hopper attention loop, and the kernel's parameters.
//
// Each mbarrier has one side that signals and one that waits:
// mbarrier         signalled by                                            waited for by
// tile_ring.full   TMA, when the keys or values of a stage have landed     the consumers
// tile_ring.empty  the consumers, when they have read a stage              the producer
// work_ring.full   the producer, when it has taken a work tile             the consumers
// work_ring.empty  the consumers, when they have read what to do           the producer
// queries_landed   TMA, when the queries of a warpgroup have landed        that warpgroup, which asked for them
// tail_landed      TMA, when the values of a partly filled tile landed     the producer, which clears the other rows
#pragma once

#include <cuda.h>

#include <cstdint>

#include "shared/attention/hopper/tiles.cuda.h"
#include "shared/attention/hopper/warp-roles.cuda.h"
#include "shared/cuda/stage-ring.cuda.h"

namespace kv::sm90a {

// Each consumer thread holds 64 scores, 32 packed weights and kDim / 2 outputs. With 64 dims there is room for three
// consumers.
template <typename ElementType, int kDim, int kConsumers = kDim == 128 ? 2 : 3>
struct AttentionShape {
  using Element = ElementType;
  using Roles = WarpRoles<kConsumers>;
  static constexpr int kHeadDim = kDim;
  static constexpr int kQueryTile = kWarpgroupRows * Roles::kConsumerWarpgroups;
  static constexpr int kKeyTile = 128;
  static constexpr int kStages = 5;        // each stage holds one tile of keys or of values
  static constexpr int kWorkStages = 2;
  static constexpr int kEarlyScores = 32;  // of the 64 of a thread
};

template <class Shape, class KeyTiles>
struct alignas(1024) AttentionStorage {
  using Element = typename Shape::Element;
  PanelTile<Element, kWarpgroupRows, Shape::kHeadDim> query[Shape::Roles::kConsumerWarpgroups];
  PanelTile<Element, Shape::kKeyTile, Shape::kHeadDim> tiles[Shape::kStages];
  Element output[Shape::Roles::kConsumerWarps][16][Shape::kHeadDim];
  StageRing<Shape::kStages> tile_ring;
  StageRing<Shape::kWorkStages> work_ring;
  uint64_t queries_landed[Shape::Roles::kConsumerWarpgroups];
  uint64_t tail_landed;
  typename KeyTiles::Work::Tile work[Shape::kWorkStages];  // key_tiles < 0 means that no work is left

  // Called by one thread before any other thread uses the mbarriers.
  __device__ void init_barriers() {
    tile_ring.init(Shape::Roles::kConsumerWarps);
    work_ring.init(32 * Shape::Roles::kConsumerWarps);
    for (uint64_t& landed : queries_landed) ptx::mbarrier_init(&landed, 1);
    ptx::mbarrier_init(&tail_landed, 1);
    ptx::fence_mbarrier_init();
  }
};

template <class KeyTiles>
struct AttentionParameters {
  typename KeyTiles::Arguments arguments;
  int box_tokens;         // tokens of one copy; divides block_tokens and the keys of a run
  unsigned* tiles_taken;  // work tiles taken after each block's first; 0 at launch
  CUtensorMap query;      // [token, query_head, dim]
  CUtensorMap keys;       // [block, block_token, dim]
  CUtensorMap values;
};

}  // namespace kv::sm90a
