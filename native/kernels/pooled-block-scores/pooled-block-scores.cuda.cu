// Pooled block scores on a CUDA device, in two steps: mean keys, then scores tile by tile.
#include "kernels/pooled-block-scores/pooled-block-scores.h"

#include "shared/prefill-block-scores/mean-keys.cuda.h"
#include "shared/prefill-block-scores/prefill-block-scores.cuda.h"
#include "shared/prefill-block-scores/resident-blocks.cuda.h"

namespace kv {
namespace {

using namespace prefill_block_scores;

constexpr int kPoolThreads = 128;

template <class Q>
using Tile = TileProducts<Rounded<Q>, 2>;
static_assert(Tile<float>::kRows == kScoredTileRows, "a thread block has a tile");

struct Launch {
  PrefillBlockScoresArguments a;
  const int32_t* fits;
  MeanKeys means;  // [kv_head, block, depth]
  SliceRoom slices;

  __host__ __device__ int items() const { return a.tiles * a.query_heads; }
};

// One thread block for each block of keys and kv head.
template <class K, class E>
__global__ void __launch_bounds__(kPoolThreads) pool_keys(const __grid_constant__ Launch launch) {
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const int block = static_cast<int>(blockIdx.x);
  const int64_t cache_head = int64_t{a.slots[0]} * a.kv_heads + blockIdx.y;
  const int32_t* blocks = a.block_table + cache_head * a.table_width;
  const int first = block * kScoredBlockKeys;
  const int end = min(first + kScoredBlockKeys, a.key_counts[cache_head]);
  E* const to = launch.means.column<E>(blockIdx.y, block);
  for (int d = static_cast<int>(threadIdx.x); d < launch.means.depth; d += kPoolThreads) {
    float sum = 0;
#pragma unroll 8
    for (int key = first; key < end && d < a.head_dim; ++key) sum += to_float(key_at<K>(a, blocks, key)[d]);
    to[d] = from_float<E>(end > first ? sum / static_cast<float>(end - first) * (a.scale * kLog2E) : 0.0f);
  }
}

template <class Q>
__global__ void __launch_bounds__(Tile<Q>::kThreads, 2) score_tiles(const __grid_constant__ Launch launch) {
  using Products = Tile<Q>;
  constexpr int kColumns = Products::kColumns;
  extern __shared__ __align__(1024) char shared[];
  __shared__ LogSum of_warps[Products::kRows / 16][kColumns];  // of 16 rows
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const Slices<Products> slices{shared, launch.slices};
  for (int item = static_cast<int>(blockIdx.x); item < launch.items(); item += static_cast<int>(gridDim.x)) {
    // The last tiles see the most, so they come first. Heads that read the same keys come together.
    const ScoredTile tile(a, item % a.query_heads, a.tiles - 1 - item / a.query_heads);
    const int seen = tile.seen();
    slices.for_each_run(
        (seen + kColumns - 1) / kColumns,
        [&](char* to, int slice) {
          load_queries<Q, Products>(to, slice, a.head_dim, [&](int row) {
            return row < tile.rows ? query_at<Q>(a, tile.first_row + row, tile.query_head) : nullptr;
          });
        },
        [&](char* to, int run, int slice) { launch.means.load<Products>(to, tile.kv_head, run, slice); },
        [&](Products& products, int) { products.begin([](int, int) { return 0.0f; }); },
        [&](const Products& products, int run) {
          const bool hides = tile.rows < kScoredTileRows || (run + 1) * kColumns > tile.seen_by(0);
#pragma unroll
          for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
              const int column = Products::column_of(n, odd);
              float logits[2];
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int row = Products::row_of(half);
                const bool sees = !hides || (row < tile.rows && run * kColumns + column < tile.seen_by(row));
                logits[half] = sees ? products.sum(half, n, odd) : -INFINITY;
              }
              const LogSum sum = sum_of<4 | 8 | 16>(logits);
              if (Products::place() == 0) of_warps[Products::warp()][column] = sum;
            }
          }
          __syncthreads();
          const int column = static_cast<int>(threadIdx.x);
          const int block = run * kColumns + column;
          if (column < kColumns && block < seen) {
            LogSum sum = of_warps[0][column];
            for (int warp = 1; warp < Products::kRows / 16; ++warp) sum = merged(sum, of_warps[warp][column]);
            tile.scores[block] = sum.natural();
          }
        });
    normalise<Products::kThreads>(a, tile);
    __syncthreads();
  }
}

template <class Q, class K>
Status estimate(const PrefillBlockScoresArguments& given, ExecutionContext& context) {
  using E = Rounded<Q>;
  using Products = Tile<Q>;
  Launch launch{given, nullptr, MeanKeys::of<E>(given, given.blocks), {}};
  ResidentBlocks resident;
  launch.slices.count = launch.means.depth / kSliceElements<E>;
  Status status = resident.find<Slices<Products>>(score_tiles<Q>, launch.slices);
  if (!status.ok()) return status;
  BlockScoresMemory memory;
  status = prepare_block_scores_cuda(launch.a, launch.means.bytes<E>(given), context, memory);
  if (!status.ok()) return status;
  launch.fits = memory.fits;
  launch.means.memory = memory.rest;
  cudaStream_t stream = stream_of(context);
  const dim3 pools(static_cast<unsigned>(launch.means.columns), static_cast<unsigned>(given.kv_heads));
  pool_keys<K, E><<<pools, kPoolThreads, 0, stream>>>(launch);
  score_tiles<Q><<<resident.of(launch.items(), 1), Products::kThreads, resident.shared_bytes, stream>>>(launch);
  return launch_status();
}

}  // namespace

Status pooled_block_scores_cuda(const PooledBlockScoresArguments& given, ExecutionContext& context) {
  Status status = Status::success();
  with_cuda_float_type(given.query_dtype, [&](auto query) {
    with_cuda_float_type(given.cache_dtype, [&](auto key) { status = estimate<decltype(query), decltype(key)>(given, context); });
  });
  return status;
}

}  // namespace kv
