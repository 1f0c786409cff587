// The main loop of Hopper attention: a consumer warpgroup computes the outputs of 64 queries. S = Q K^T of one key
// tile runs while the tensor cores still add P V of the previous tile. The softmax of one warpgroup runs during the
// products of the other. Each warpgroup fetches its own queries, as soon as it has read those of the work tile before.
// So one computes while the other is between two work tiles. Device code.
//
// The consumer waits for work_ring.full, queries_landed and tile_ring.full. It signals work_ring.empty and
// tile_ring.empty.
#pragma once

#include "ptx/named-barrier.cuda.h"
#include "ptx/tensor-copy.cuda.h"
#include "ptx/wgmma.cuda.h"
#include "shared/attention/hopper/epilogue.cuda.h"
#include "shared/attention/hopper/storage.cuda.h"
#include "shared/attention/online-softmax.cuda.h"

namespace kv::sm90a {

template <class Shape, class KeyTiles>
class AttentionConsumer {
 public:
  using Element = typename Shape::Element;
  using Parameters = AttentionParameters<KeyTiles>;
  using Storage = AttentionStorage<Shape, KeyTiles>;

  __device__ AttentionConsumer(const Parameters& parameters, Storage& shared)
      : arguments_(parameters.arguments),
        queries_(parameters.query),
        shared_(shared),
        // By a shuffle, so that the compiler sees that it is the same in all lanes, and so are the loop's stages.
        warpgroup_(__shfl_sync(0xffffffffu, threadIdx.x / kWarpgroupThreads - 1, 0)),
        warp_(threadIdx.x / 32 - 4),
        lane_(threadIdx.x % 32) {}

  __device__ void run() {
    for (fetch_queries();;) {
      const WorkTile work = shared_.work[__shfl_sync(0xffffffffu, work_at_.stage, 0)];
      if (work.key_tiles < 0) break;
      // Every thread arrives for itself: compute-sanitizer does not see that one lane's arrival covers the reads of its
      // warp.
      shared_.work_ring.release_by_thread(work_at_);
      work_at_.advance();
      attend(work);
    }
  }

 private:
  using WorkTile = typename KeyTiles::Work::Tile;
  using Walk = typename KeyTiles::Walk;
  using Tile = typename KeyTiles::Tile;
  using Position = RingPosition<Shape::kStages>;
  static constexpr int kScores = Shape::kKeyTile / 2;  // of each thread
  static constexpr int kRunScores = kScores / KeyTiles::kRuns;
  static constexpr int kOutputs = Shape::kHeadDim / 2;

  // A thread holds the scores of two rows of the work tile: `row` and row + 8.
  __device__ int row() const { return warp_ * 16 + lane_ / 4; }

  // Waits for the next work tile, and starts the copy of its queries to the place of those that this warpgroup has
  // read.
  __device__ void fetch_queries() {
    shared_.work_ring.wait_full(work_at_);
    ptx::named_barrier_sync(1 + warpgroup_, kWarpgroupThreads);  // All its warps have read them.
    const WorkTile& work = shared_.work[work_at_.stage];
    if (threadIdx.x % kWarpgroupThreads != 0 || work.key_tiles <= 0) return;
    auto& query = shared_.query[warpgroup_];
    uint64_t* landed = &shared_.queries_landed[warpgroup_];
    ptx::mbarrier_arrive_expect_bytes(landed, sizeof(query));
    for (int panel = 0; panel < Shape::kHeadDim / kPanelColumns; ++panel) {
      ptx::tensor_copy(query[panel], &queries_, panel * kPanelColumns, work.query_head,
                       work.first_row + work.first_query + warpgroup_ * kWarpgroupRows, landed);
    }
  }

  __device__ Position next_tile() {
    const Position at = tile_at_;
    tile_at_.advance();
    return at;
  }

  __device__ void attend(const WorkTile& work) {
    OnlineSoftmax softmax(arguments_.scale);
    float output[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;

    if (work.key_tiles > 0) {
      uint32_t weights[kScores / 2];
      ptx::mbarrier_wait(&shared_.queries_landed[warpgroup_], queries_parity_);
      queries_parity_ ^= 1;
      Walk walk(arguments_, work);
      first_step(work, walk.tile(), softmax, weights);
      for (walk.advance(); walk.hides(); walk.advance()) step<true>(work, walk.tile(), softmax, output, weights);
      for (; walk.more(); walk.advance()) step<false>(work, walk.tile(), softmax, output, weights);
      fetch_queries();
      last_step(output, weights);
    } else {
      fetch_queries();
    }
    softmax.finish();
    store_outputs(arguments_, work, warp_, softmax, output, shared_.output[warp_]);
  }

  // Computes the scores and weights of the first key tile.
  __device__ void first_step(const WorkTile& work, Tile tile, OnlineSoftmax& softmax,
                             uint32_t (&weights)[kScores / 2]) {
    float scores[kScores];
    float correction[2];
    const Position keys = next_tile();
    shared_.tile_ring.wait_full(keys);
    ptx::wgmma_fence();
    score_keys(keys, scores);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(scores);
    shared_.tile_ring.release(keys);
    if (tile.hides()) mask(work, tile, scores);
    softmax.observe(scores, correction);
    softmax.weigh<0, kScores>(scores);
    pack_weights(scores, weights);
    if (!tile.last()) shared_.tile_ring.wait_full(tile_at_);
  }

  // Computes the scores and weights of this key tile, whose keys have landed. Meanwhile the weights of the previous
  // tile are multiplied by their values.
  template <bool kHides>
  __device__ void step(const WorkTile& work, Tile tile, OnlineSoftmax& softmax, float (&output)[kOutputs],
                       uint32_t (&weights)[kScores / 2]) {
    float scores[kScores];
    float correction[2];
    const Position keys = next_tile();
    const Position values = next_tile();
    ptx::pin_registers(output);
    ptx::wgmma_fence();
    score_keys(keys, scores);
    shared_.tile_ring.wait_full(values);
    ptx::wgmma_fence();
    add_values(values, weights, output);
    ptx::wgmma_wait<1>();
    ptx::pin_registers(scores);
    shared_.tile_ring.release(keys);
    if (kHides && tile.hides()) mask(work, tile, scores);
    const bool corrects = softmax.observe(scores, correction);
    // These weights are computed during the previous tile's products. The compiler must not move the later ones up
    // before the products are done. The wait for the next keys, which is a loop, keeps it from that.
    softmax.weigh<0, Shape::kEarlyScores>(scores);
    if (!tile.last()) shared_.tile_ring.wait_full(tile_at_);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(output);
    shared_.tile_ring.release(values);
    if (corrects) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) output[i] *= correction[(i >> 1) & 1];
    }
    softmax.weigh<Shape::kEarlyScores, kScores>(scores);
    pack_weights(scores, weights);
  }

  __device__ void pack_weights(const float (&scores)[kScores], uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i] = ptx::pack<Element>(scores[2 * i], scores[2 * i + 1]);
  }

  // Multiplies the weights of the last key tile by their values.
  __device__ void last_step(float (&output)[kOutputs], uint32_t (&weights)[kScores / 2]) {
    const Position values = next_tile();
    shared_.tile_ring.wait_full(values);
    ptx::pin_registers(output);
    ptx::wgmma_fence();
    add_values(values, weights, output);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(output);
    shared_.tile_ring.release(values);
  }

  __device__ void score_keys(Position at, float (&scores)[kScores]) {
    ScoreProducts(shared_.query[warpgroup_], 0, shared_.tiles[at.stage]).issue(scores);
  }

  __device__ void add_values(Position at, uint32_t (&weights)[kScores / 2], float (&output)[kOutputs]) {
    const uint64_t values = ptx::wgmma_operand(shared_.tiles[at.stage], Shape::kKeyTile * kPanelBytes);
#pragma unroll
    for (int key = 0; key < Shape::kKeyTile; key += 16) {
      ptx::WgmmaRegisters<Element, Shape::kHeadDim>::issue(output, &weights[key / 4],
                                                           ptx::wgmma_advance(values, key * kPanelBytes));
    }
    ptx::wgmma_commit();
  }

  // Sets a score to minus infinity if its key is absent or comes after the query.
  __device__ void mask(const WorkTile& work, Tile tile, float (&scores)[kScores]) {
    const int advance = arguments_.causal ? 1 : 0;
#pragma unroll
    for (int run = 0; run < KeyTiles::kRuns; ++run) {
      const int first_key = tile.first_key(run) + 2 * (lane_ % 4);
      const int seen[2] = {min(work.visible_keys + advance * row(), work.key_count) - first_key,
                           min(work.visible_keys + advance * (row() + 8), work.key_count) - first_key};
#pragma unroll
      for (int i = 0; i < kRunScores; ++i) {
        const int key = 8 * (i / 4) + i % 2;
        if (key >= seen[(i >> 1) & 1]) scores[run * kRunScores + i] = -INFINITY;
      }
    }
  }

  const typename KeyTiles::Arguments& arguments_;
  const CUtensorMap& queries_;
  Storage& shared_;
  const int warpgroup_;
  const int warp_;  // counted over all consumers
  const int lane_;
  Position tile_at_;
  RingPosition<Shape::kWorkStages> work_at_;
  uint32_t queries_parity_ = 0;
};

}  // namespace kv::sm90a
