// Clustered block scores on a CUDA device, in two steps: clusters of keys, then scores. A thread block of the second step
// has 128 scored rows of one query head, which are two tiles. It goes over all clusters twice: first for each row's
// denominator, then for the shares.
#include "kernels/clustered-block-scores/clustered-block-scores.h"

#include "shared/block-scores/block-scores.cuda.h"

namespace kv {
namespace {

using namespace block_scores;

struct Launch {
  BlockScoresArguments a;
  const int32_t* fits;
  float* means;       // [kv_head, block, cluster, dim]
  float* logarithms;  // [kv_head, block, cluster]: of how many keys the cluster has
};

// The keys of one block, for all threads of a thread block. Every function ends behind a barrier.
template <class T>
struct BlockKeys {
  const BlockScoresArguments& a;
  const int32_t* blocks;
  int first;
  int count;

  __device__ float at(int key, int d) const { return to_float(key_at<T>(a, blocks, first + key)[d]); }

  __device__ void seed_with_mean(float* seed) const {
    for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kThreads) {
      float sum = 0;
      for (int key = 0; key < count; ++key) sum += at(key, d);
      seed[d] = sum / static_cast<float>(count);
    }
    __syncthreads();
  }

  __device__ void seed_with(int key, float* seed) const {
    for (int d = static_cast<int>(threadIdx.x); d < a.head_dim; d += kThreads) seed[d] = at(key, d);
    __syncthreads();
  }

  // Squared distances of all keys from the seed; a warp has a key.
  __device__ void measure(const float* seed, float* distances) const {
    for (int key = static_cast<int>(threadIdx.x) / kWarp; key < count; key += kWarps) {
      float sum = 0;
      for (int d = static_cast<int>(threadIdx.x) % kWarp; d < a.head_dim; d += kWarp) {
        const float apart = at(key, d) - seed[d];
        sum += apart * apart;
      }
      for (int bit = 1; bit < kWarp; bit *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
      if (threadIdx.x % kWarp == 0) distances[key] = sum;
    }
    __syncthreads();
  }

  // The first of the farthest keys; the first key where all distances are NaN.
  __device__ int farthest(const float* distances) const {
    int best = 0;
    for (int key = 1; key < count; ++key) best = distances[key] > distances[best] ? key : best;
    return best;
  }
};

// One thread block for each block of keys and kv head. The shared memory has a seed.
template <class T>
__global__ void __launch_bounds__(kThreads) cluster_keys(const __grid_constant__ Launch launch) {
  extern __shared__ float seed[];
  __shared__ float distances[kScoredBlockKeys];
  __shared__ float nearest[kScoredBlockKeys];
  __shared__ int cluster_of[kScoredBlockKeys];
  if (*launch.fits == 0) return;
  const BlockScoresArguments& a = launch.a;
  const int64_t block = int64_t{blockIdx.y} * a.blocks + blockIdx.x;
  const int64_t cache_head = int64_t{a.slots[0]} * a.kv_heads + blockIdx.y;
  const int first = static_cast<int>(blockIdx.x) * kScoredBlockKeys;
  const BlockKeys<T> keys{a, a.block_table + cache_head * a.table_width, first,
                          min(kScoredBlockKeys, a.key_counts[cache_head] - first)};
  const int own = static_cast<int>(threadIdx.x);
  if (own < kScoredBlockKeys) {
    nearest[own] = INFINITY;
    cluster_of[own] = 0;
  }
  keys.seed_with_mean(seed);
  keys.measure(seed, distances);
  int next = keys.farthest(distances);
  for (int cluster = 0; cluster < kKeyClusters; ++cluster) {
    keys.seed_with(next, seed);
    keys.measure(seed, distances);
    // A key that is not finite stays in the first cluster.
    if (own < keys.count && distances[own] < nearest[own]) {
      nearest[own] = distances[own];
      cluster_of[own] = cluster;
    }
    __syncthreads();
    next = keys.farthest(nearest);
    __syncthreads();
  }
  for (int cluster = 0; cluster < kKeyClusters; ++cluster) {
    int size = 0;
    for (int key = 0; key < keys.count; ++key) size += cluster_of[key] == cluster;
    const int64_t at = block * kKeyClusters + cluster;
    if (own == 0) launch.logarithms[at] = logf(static_cast<float>(size));
    for (int d = own; d < a.head_dim; d += kThreads) {
      float sum = 0;
      for (int key = 0; key < keys.count; ++key) sum += cluster_of[key] == cluster ? keys.at(key, d) : 0.0f;
      launch.means[at * a.head_dim + d] = size > 0 ? sum / static_cast<float>(size) : 0.0f;
    }
  }
}

// The scored rows of a thread block: two tiles. Row r is row kScoredRowStep * r of the tiles.
struct Band {
  static constexpr int kTiles = Products::kRows / kScoredRowsOfTile;
  static constexpr int kBlocksOfRun = Products::kColumns / kKeyClusters;
  static_assert(kTiles == 2 && kKeyClusters == 8, "two pairs of warps have a tile each, and each 8 columns are a block");

  const Launch& launch;
  ScoredTile first;  // the first tile
  int rows;          // scored ones that there are

  __device__ Band(const Launch& given, int64_t query_head, int tile)
      : launch(given),
        first(given.a, query_head, tile),
        rows(min(Products::kRows, (first.tokens - first.position + kScoredRowStep - 1) / kScoredRowStep)) {}

  __device__ int seen_by(int row) const { return row < rows ? first.seen_by(row * kScoredRowStep) : 0; }
  __device__ int seen_by_last() const { return seen_by(rows - 1); }

  // Of the rows of this thread and the blocks from `first_block` on, [m, half, n]. Minus infinity for a block that the row
  // does not see. The four lanes of a row all get its logits.
  template <class Q>
  __device__ void read_logits(Products::Shared& shared, int first_block, float (&logits)[2][2][4]) const {
    const BlockScoresArguments& a = launch.a;
    const int64_t first_cluster = (first.kv_head * a.blocks + first_block) * kKeyClusters;
    const int clusters = (a.blocks - first_block) * kKeyClusters;
    Products products;
    products.add(
        shared, a.head_dim,
        [&](int k) {
          return [this, &a, k](int row) {
            return row < rows ? to_float(query_at<Q>(a, first.first_row + row * kScoredRowStep, first.query_head)[k]) : 0.0f;
          };
        },
        [&](int k) {
          return [this, &a, first_cluster, clusters, k](int column) {
            return column < clusters ? launch.means[(first_cluster + column) * a.head_dim + k] : 0.0f;
          };
        });
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int column = Products::column_of(n, 0);
      const int block = first_block + column / kKeyClusters;
      float logarithms[2] = {-INFINITY, -INFINITY};
      for (int odd = 0; odd < 2; ++odd) {
        if (column + odd < clusters) logarithms[odd] = launch.logarithms[first_cluster + column + odd];
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float logit = -INFINITY;
          for (int odd = 0; odd < 2; ++odd) {
            logit = larger(logit, products.sums[m][n][2 * half + odd] * a.scale + logarithms[odd]);
          }
          for (int bit = 1; bit < 4; bit *= 2) logit = larger(logit, __shfl_xor_sync(0xffffffffu, logit, bit));
          logits[m][half][n] = block < seen_by(Products::row_of(m, half)) ? logit : -INFINITY;
        }
      }
    }
  }

 private:
  // NaN if either is.
  __device__ static float larger(float a, float b) { return a > b || a != a ? a : b; }
};

template <class Q>
__global__ void __launch_bounds__(kThreads) score_bands(const __grid_constant__ Launch launch) {
  __shared__ Products::Shared shared;
  __shared__ LogSum of_rows[2][Products::kRows];                 // of the blocks of either half of the columns
  __shared__ LogSum of_warps[kWarps / 2][Band::kBlocksOfRun];    // of 32 rows
  if (*launch.fits == 0) return;
  const BlockScoresArguments& a = launch.a;
  const int first_tile = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Band::kTiles;
  const Band band(launch, blockIdx.y, first_tile);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int end = band.seen_by_last();

  LogSum sums[2][2] = {{LogSum::nothing(), LogSum::nothing()}, {LogSum::nothing(), LogSum::nothing()}};
  for (int first = 0; first < end; first += Band::kBlocksOfRun) {
    float logits[2][2][4];
    band.read_logits<Q>(shared, first, logits);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sums[m][half] = merged(sums[m][half], sum_of<0>(logits[m][half]));
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane % 4 == 0) of_rows[warp % 2][Products::row_of(m, half)] = sums[m][half];
    }
  }
  __syncthreads();
  float denominators[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Products::row_of(m, half);
      denominators[m][half] = row < band.rows ? merged(of_rows[0][row], of_rows[1][row]).logarithm() : 0;
    }
  }

  for (int first = 0; first < end; first += Band::kBlocksOfRun) {
    float logits[2][2][4];
    band.read_logits<Q>(shared, first, logits);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float shares[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) shares[i] = logits[i / 2][i % 2][n] - denominators[i / 2][i % 2];
      const LogSum sum = sum_of<4 | 8 | 16>(shares);
      if (lane == 0) of_warps[warp / 2][Products::column_of(n, 0) / kKeyClusters] = sum;
    }
    __syncthreads();
    const int tile = static_cast<int>(threadIdx.x) / Band::kBlocksOfRun;
    const int block = static_cast<int>(threadIdx.x) % Band::kBlocksOfRun;
    const int rows = min(kScoredRowsOfTile, band.rows - tile * kScoredRowsOfTile);
    if (tile < Band::kTiles && rows > 0 && first + block < a.blocks) {
      const LogSum sum = merged(of_warps[2 * tile][block], of_warps[2 * tile + 1][block]);
      band.first.scores[int64_t{tile} * a.blocks + first + block] = sum.logarithm() - logf(static_cast<float>(rows));
    }
  }
  const int scored = (end + Band::kBlocksOfRun - 1) / Band::kBlocksOfRun * Band::kBlocksOfRun;
  for (int tile = 0; tile < Band::kTiles && first_tile + tile < a.tiles; ++tile) {
    for (int block = scored + static_cast<int>(threadIdx.x); block < a.blocks; block += kThreads) {
      band.first.scores[int64_t{tile} * a.blocks + block] = -INFINITY;
    }
  }
}

}  // namespace

Status clustered_block_scores_cuda(const ClusteredBlockScoresArguments& given, ExecutionContext& context) {
  Launch launch{given, nullptr, nullptr, nullptr};
  const int64_t clusters = int64_t{given.kv_heads} * given.blocks * kKeyClusters;
  BlockScoresMemory memory;
  const Status status =
      prepare_block_scores_cuda(launch.a, static_cast<size_t>(clusters * (given.head_dim + 1)) * sizeof(float), context, memory);
  if (!status.ok()) return status;
  launch.fits = memory.fits;
  launch.means = reinterpret_cast<float*>(memory.rest);
  launch.logarithms = launch.means + clusters * given.head_dim;
  cudaStream_t stream = stream_of(context);
  const dim3 blocks(static_cast<unsigned>(given.blocks), static_cast<unsigned>(given.kv_heads));
  with_cuda_float_type(given.cache_dtype, [&](auto element) {
    cluster_keys<decltype(element)><<<blocks, kThreads, static_cast<size_t>(given.head_dim) * sizeof(float), stream>>>(launch);
  });
  const dim3 bands(static_cast<unsigned>((given.tiles + Band::kTiles - 1) / Band::kTiles), static_cast<unsigned>(given.query_heads));
  with_cuda_float_type(given.query_dtype, [&](auto element) {
    score_bands<decltype(element)><<<bands, kThreads, 0, stream>>>(launch);
  });
  return launch_status();
}

}  // namespace kv
