// Pooled block scores on a CUDA device, in two steps: mean keys, then scores tile by tile.
#include "kernels/pooled-block-scores/pooled-block-scores.h"

#include "shared/block-scores/block-scores.cuda.h"

namespace kv {
namespace {

using namespace block_scores;

struct Launch {
  BlockScoresArguments a;
  const int32_t* fits;
  float* means;  // [kv_head, block, dim]
};

// One thread block for each block of keys and kv head.
template <class T>
__global__ void __launch_bounds__(kThreads) pool_keys(const __grid_constant__ Launch launch) {
  if (*launch.fits == 0) return;
  const BlockScoresArguments& a = launch.a;
  const int block = static_cast<int>(blockIdx.x);
  const int64_t kv_head = blockIdx.y;
  const int64_t cache_head = int64_t{a.slots[0]} * a.kv_heads + kv_head;
  const int32_t* blocks = a.block_table + cache_head * a.table_width;
  const int first = block * kScoredBlockKeys;
  const int end = min(first + kScoredBlockKeys, a.key_counts[cache_head]);
  float* to = launch.means + (kv_head * a.blocks + block) * a.head_dim;
  for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kThreads) {
    float sum = 0;
    for (int key = first; key < end; ++key) sum += to_float(key_at<T>(a, blocks, key)[d]);
    to[d] = sum / static_cast<float>(end - first);
  }
}

// One thread block for each tile and query head.
template <class Q>
__global__ void __launch_bounds__(kThreads) score_tiles(const __grid_constant__ Launch launch) {
  __shared__ Products::Shared shared;
  __shared__ LogSum of_warps[4][Products::kColumns];  // of 32 rows
  if (*launch.fits == 0) return;
  const BlockScoresArguments& a = launch.a;
  const ScoredTile tile(a, blockIdx.y, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const int seen = tile.seen();
  const float* means = launch.means + tile.kv_head * a.blocks * a.head_dim;
  for (int first = 0; first < seen; first += Products::kColumns) {
    Products products;
    products.add(
        shared, a.head_dim,
        [&](int k) {
          return [&a, &tile, k](int row) {
            return row < tile.rows ? to_float(query_at<Q>(a, tile.first_row + row, tile.query_head)[k]) : 0.0f;
          };
        },
        [&](int k) {
          return [=, &a](int column) { return first + column < seen ? means[int64_t{first + column} * a.head_dim + k] : 0.0f; };
        });
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int block = first + Products::column_of(n, odd);
        float logits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = Products::row_of(i / 2, i % 2);
          const bool sees = row < tile.rows && block < tile.seen_by(row);
          logits[i] = sees ? products.sums[i / 2][n][2 * (i % 2) + odd] * a.scale : -INFINITY;
        }
        const LogSum sum = sum_of<4 | 8 | 16>(logits);
        if (threadIdx.x % kWarp < 4) of_warps[threadIdx.x / kWarp / 2][Products::column_of(n, odd)] = sum;
      }
    }
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x);
    if (column < Products::kColumns && first + column < seen) {
      LogSum sum = of_warps[0][column];
      for (int part = 1; part < 4; ++part) sum = merged(sum, of_warps[part][column]);
      tile.scores[first + column] = sum.logarithm();
    }
  }
  normalise(a, tile);
}

}  // namespace

Status pooled_block_scores_cuda(const PooledBlockScoresArguments& given, ExecutionContext& context) {
  Launch launch{given, nullptr, nullptr};
  const size_t bytes = static_cast<size_t>(int64_t{given.kv_heads} * given.blocks * given.head_dim) * sizeof(float);
  BlockScoresMemory memory;
  const Status status = prepare_block_scores_cuda(launch.a, bytes, context, memory);
  if (!status.ok()) return status;
  launch.fits = memory.fits;
  launch.means = reinterpret_cast<float*>(memory.rest);
  cudaStream_t stream = stream_of(context);
  const dim3 pools(static_cast<unsigned>(given.blocks), static_cast<unsigned>(given.kv_heads));
  with_cuda_float_type(given.cache_dtype, [&](auto element) {
    pool_keys<decltype(element)><<<pools, kThreads, 0, stream>>>(launch);
  });
  const dim3 tiles(static_cast<unsigned>(given.tiles), static_cast<unsigned>(given.query_heads));
  with_cuda_float_type(given.query_dtype, [&](auto element) {
    score_tiles<decltype(element)><<<tiles, kThreads, 0, stream>>>(launch);
  });
  return launch_status();
}

}  // namespace kv
