// The producer of the Hopper attention loop: one warp, which takes work tiles and copies their keys and values to shared
// memory by TMA. Each lane looks up one box of a key tile and starts its copy. It is ahead of the consumers by the
// stages of the rings, also from one work tile to the next. Device code.
//
// The producer waits for tile_ring.empty, work_ring.empty and tail_landed. It signals tile_ring.full and work_ring.full.
#pragma once

#include "shared/attention/hopper/persistent-blocks.cuda.h"
#include "shared/attention/hopper/storage.cuda.h"

namespace kv::sm90a {

template <class Shape, class KeyTiles>
class AttentionProducer {
 public:
  using Parameters = AttentionParameters<KeyTiles>;
  using Storage = AttentionStorage<Shape, KeyTiles>;

  __device__ AttentionProducer(const Parameters& parameters, Storage& shared)
      : parameters_(parameters), shared_(shared), lane_(threadIdx.x % 32) {}

  __device__ void run() {
    Work numbering(parameters_.arguments);
    WorkNumber number(parameters_.tiles_taken);
    WorkTile work;
    for (; numbering.find(number.current(), &work); number.advance()) {
      number.ask();
      publish(work);
      if (work.key_tiles > 0) load_keys_and_values(work);
    }
    work.key_tiles = -1;
    publish(work);
  }

 private:
  using Work = typename KeyTiles::Work;
  using WorkTile = typename Work::Tile;
  using Tile = typename KeyTiles::Tile;
  using Box = typename KeyTiles::Box;
  static constexpr int kPanels = Shape::kHeadDim / kPanelColumns;
  static constexpr int kRunKeys = Shape::kKeyTile / KeyTiles::kRuns;

  __device__ void publish(const WorkTile& work) {
    shared_.work_ring.wait_empty(work_at_);
    if (lane_ == 0) {
      shared_.work[work_at_.stage] = work;
      ptx::mbarrier_arrive(&shared_.work_ring.full[work_at_.stage]);
    }
    work_at_.advance();
  }

  // Copies are made in the order of use: the consumers need values one step later than keys.
  __device__ void load_keys_and_values(const WorkTile& work) {
    const typename KeyTiles::Boxes boxes(parameters_.arguments, parameters_.box_tokens, work);
    typename KeyTiles::Walk walk(parameters_.arguments, work);
    Tile tile = walk.tile();
    Box box = boxes.first(tile);
    load_keys(box);
    while (!tile.last()) {
      walk.advance();
      const Box next = boxes.after(box, walk.tile());
      load_keys(next);
      load_values(work, tile, box);
      tile = walk.tile();
      box = next;
    }
    load_values(work, tile, box);
  }

  __device__ void load_keys(const Box& box) {
    shared_.tile_ring.wait_empty(tile_at_);
    copy(&parameters_.keys, box, box.key_block, &shared_.tile_ring.full[tile_at_.stage]);
    tile_at_.advance();
  }

  __device__ void load_values(const WorkTile& work, Tile tile, const Box& box) {
    shared_.tile_ring.wait_empty(tile_at_);
    uint64_t* full = &shared_.tile_ring.full[tile_at_.stage];
    bool whole = true;
#pragma unroll
    for (int run = 0; run < KeyTiles::kRuns; ++run) {
      whole = whole && (!tile.hides() || work.key_count - tile.first_key(run) >= kRunKeys);
    }
    if (whole) {
      copy(&parameters_.values, box, box.value_block, full);
    } else {
      // Weights of absent keys are 0. But 0 times the memory's old content may be NaN, so these rows are cleared
      // first.
      copy(&parameters_.values, box, box.value_block, &shared_.tail_landed);
      ptx::mbarrier_wait(&shared_.tail_landed, tail_parity_);
      tail_parity_ ^= 1;
#pragma unroll
      for (int run = 0; run < KeyTiles::kRuns; ++run) {
        const int keys = max(work.key_count - tile.first_key(run), 0);
        clear_rows(shared_.tiles[tile_at_.stage], run * kRunKeys + keys, (run + 1) * kRunKeys);
      }
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane_ == 0) ptx::mbarrier_arrive(full);
    }
    tile_at_.advance();
  }

  // Every lane copies its box, from `block`, to the current stage. The bytes count on `barrier`.
  __device__ void copy(const CUtensorMap* pool, const Box& box, int block, uint64_t* barrier) {
    const unsigned present = __ballot_sync(0xffffffffu, block >= 0);
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect_bytes(barrier, __popc(present) * parameters_.box_tokens * kPanels * kPanelBytes);
    }
    if (block < 0) return;
    copy_box(shared_.tiles[tile_at_.stage], lane_ * parameters_.box_tokens, pool, box.token, block, barrier);
  }

  const Parameters& parameters_;
  Storage& shared_;
  const int lane_;
  RingPosition<Shape::kStages> tile_at_;
  RingPosition<Shape::kWorkStages> work_at_;
  uint32_t tail_parity_ = 0;
};

}  // namespace kv::sm90a
