// The clusters of the keys of one block, by one thread block.
#pragma once

#include "kernels/clustered-block-scores/clustered-block-scores.h"
#include "shared/prefill-block-scores/mean-keys.cuda.h"
#include "shared/prefill-block-scores/prefill-block-scores.cuda.h"

namespace kv {
namespace prefill_block_scores {

constexpr int kClusterThreads = 2 * kScoredBlockKeys;
// A run of columns is of so many blocks.
constexpr int kBlocksOfRun = 128 / kKeyClusters;

struct Clusters {
  MeanKeys means;
  float* logarithms;  // [kv_head, column]: base 2, of how many keys the cluster has

  // All clusters of a block come to one thread of the products.
  __device__ static int column_of(int block, int cluster) {
    return block / 4 * 4 * kKeyClusters + cluster / 2 * 8 + block % 4 * 2 + cluster % 2;
  }
};

// The keys of a block in shared memory, of which every warp knows the same.
template <class K>
class BlockKeys {
 public:
  static constexpr int kVector = kPieceElements<K>;

  __device__ BlockKeys(char* shared, const PrefillBlockScoresArguments& a, int keys) : dim_(a.head_dim), count_(keys) {
    seed_ = reinterpret_cast<float*>(shared);
    rows_ = shared + padded(dim_) * static_cast<int>(sizeof(float));
  }

  static constexpr int bytes(int dim) {
    return padded(dim) * static_cast<int>(sizeof(float)) + kScoredBlockKeys * stride(dim);
  }

  __device__ void load(const PrefillBlockScoresArguments& a, const int32_t* blocks, int first) {
    const int vectors = padded(dim_) / kVector;
    const bool whole = a.head_dim % kVector == 0 && a.token_stride % kVector == 0 && a.block_stride % kVector == 0 &&
                       reinterpret_cast<uintptr_t>(a.keys) % kPieceBytes == 0;
    for (int i = static_cast<int>(threadIdx.x); i < count_ * vectors; i += kClusterThreads) {
      const int key = i / vectors;
      const int d = i % vectors * kVector;
      const K* const from = key_at<K>(a, blocks, first + key) + d;
      char* const to = rows_ + key * stride(dim_) + d * static_cast<int>(sizeof(K));
      if (whole) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      else store_piece<K>(to, [&](int e) { return d + e < dim_ ? to_float(from[e]) : 0.0f; });
    }
    __syncthreads();
  }

  // Finds the clusters; each lane has the keys lane and lane + 32.
  __device__ void find_clusters() {
    for (int d = own(); d < padded(dim_); d += kClusterThreads) {
      float sum = 0;
      for (int key = 0; key < count_; ++key) sum += at(key, d);
      seed_[d] = sum / static_cast<float>(count_);
    }
    float distances[2];
    measure(distances);
    int next = farthest(distances);
    float nearest[2] = {INFINITY, INFINITY};
    for (int cluster = 0; cluster < kKeyClusters; ++cluster) {
      for (int d = own(); d < padded(dim_); d += kClusterThreads) seed_[d] = at(next, d);
      measure(distances);
      // A key that is not finite stays in the first cluster.
      for (int i = 0; i < 2; ++i) {
        if (!(distances[i] < nearest[i])) continue;
        nearest[i] = distances[i];
        cluster_of_[i] = cluster;
      }
      next = farthest(nearest);
    }
  }

  // Sorts the keys by cluster.
  __device__ void sort(int (&order)[kScoredBlockKeys], int (&starts)[kKeyClusters + 1]) const {
    int start = 0;
    const unsigned before = (1u << lane()) - 1;
    for (int cluster = 0; cluster < kKeyClusters; ++cluster) {
      unsigned members[2];
      for (int i = 0; i < 2; ++i) members[i] = __ballot_sync(0xffffffffu, is_real(i) && cluster_of_[i] == cluster);
      if (own() < kWarp) {
        if (own() == 0) starts[cluster] = start;
        for (int i = 0; i < 2; ++i) {
          const int rank = __popc(members[i] & before) + (i == 1 ? __popc(members[0]) : 0);
          if ((members[i] >> lane() & 1) != 0) order[start + rank] = lane() + i * kWarp;
        }
      }
      start += __popc(members[0]) + __popc(members[1]);
    }
    if (own() == 0) starts[kKeyClusters] = start;
    __syncthreads();
  }

  __device__ float at(int key, int d) const {
    return to_float(reinterpret_cast<const K*>(rows_ + key * stride(dim_))[d]);
  }

 private:
  static constexpr int padded(int dim) { return (dim + kVector - 1) / kVector * kVector; }
  // An odd number of pieces, so that a piece of eight keys lies in all banks.
  static constexpr int stride(int dim) { return (padded(dim) / kVector | 1) * kPieceBytes; }
  __device__ static int own() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return own() % kWarp; }
  __device__ bool is_real(int i) const { return lane() + i * kWarp < count_; }

  // Squared distances of the lane's keys from the seed. Two threads have half of a key each.
  __device__ void measure(float (&distances)[2]) const {
    __shared__ float halves[2][kScoredBlockKeys];
    const int key = own() % kScoredBlockKeys;
    const int half = own() / kScoredBlockKeys;
    __syncthreads();
    const char* const row = rows_ + key * stride(dim_);
    float sum = 0;
    for (int piece = half; piece < padded(dim_) / kVector && key < count_; piece += 2) {
      const uint4 bits = *reinterpret_cast<const uint4*>(row + piece * kPieceBytes);
      const K* const elements = reinterpret_cast<const K*>(&bits);
      const float4* const seed = reinterpret_cast<const float4*>(seed_ + piece * kVector);
#pragma unroll
      for (int i = 0; i < kVector; i += 4) {
        const float4 of_seed = seed[i / 4];
        const float apart[4] = {to_float(elements[i]) - of_seed.x, to_float(elements[i + 1]) - of_seed.y,
                                to_float(elements[i + 2]) - of_seed.z, to_float(elements[i + 3]) - of_seed.w};
#pragma unroll
        for (const float each : apart) sum += each * each;
      }
    }
    halves[half][key] = sum;
    __syncthreads();
    for (int i = 0; i < 2; ++i) distances[i] = halves[0][lane() + i * kWarp] + halves[1][lane() + i * kWarp];
  }

  // The first of the farthest keys; the first key where its distance is NaN.
  __device__ int farthest(const float (&distances)[2]) const {
    unsigned bits[2];  // of numbers that are not negative, in the same order
    for (int i = 0; i < 2; ++i) bits[i] = is_real(i) && distances[i] >= 0 ? __float_as_uint(distances[i]) : 0;
    const unsigned most = __reduce_max_sync(0xffffffffu, max(bits[0], bits[1]));
    const unsigned first = __ballot_sync(0xffffffffu, bits[0] == most);
    const unsigned second = __ballot_sync(0xffffffffu, bits[1] == most);
    const float of_first_key = __shfl_sync(0xffffffffu, distances[0], 0);
    if (!(of_first_key >= 0)) return 0;
    return first != 0 ? __ffs(static_cast<int>(first)) - 1 : kWarp + __ffs(static_cast<int>(second)) - 1;
  }

  int dim_;
  int count_;
  float* seed_;
  char* rows_;
  int cluster_of_[2] = {0, 0};
};

// One thread block for each block of keys and kv head. E is what the means are rounded to.
template <class K, class E>
__global__ void __launch_bounds__(kClusterThreads) cluster_keys(const __grid_constant__ PrefillBlockScoresArguments a,
                                                               const __grid_constant__ Clusters clusters, const int32_t* fits) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int order[kScoredBlockKeys];
  __shared__ int starts[kKeyClusters + 1];
  if (*fits == 0) return;
  const int block = static_cast<int>(blockIdx.x);
  const int64_t cache_head = int64_t{a.slots[0]} * a.kv_heads + blockIdx.y;
  const int first = block * kScoredBlockKeys;
  const int own = static_cast<int>(threadIdx.x);
  BlockKeys<K> keys(shared, a, min(kScoredBlockKeys, a.key_counts[cache_head] - first));
  if (block < a.blocks) {
    keys.load(a, a.block_table + cache_head * a.table_width, first);
    keys.find_clusters();
    keys.sort(order, starts);
  } else {
    if (own <= kKeyClusters) starts[own] = 0;
    __syncthreads();
  }
  const float factor = a.scale * kLog2E;
  for (int cluster = 0; cluster < kKeyClusters; ++cluster) {
    const int column = Clusters::column_of(block, cluster);
    E* const mean = clusters.means.column<E>(blockIdx.y, column);
    const int start = starts[cluster];
    const int end = starts[cluster + 1];
    const auto size = static_cast<float>(end - start);
    if (own == 0) clusters.logarithms[int64_t{blockIdx.y} * clusters.means.columns + column] = log2f(size);
    for (int d = own; d < clusters.means.depth; d += kClusterThreads) {
      float sum = 0;
      for (int i = start; i < end && d < a.head_dim; ++i) sum += keys.at(order[i], d);
      mean[d] = from_float<E>(start < end ? sum / size * factor : 0.0f);
    }
  }
}

}  // namespace prefill_block_scores
}  // namespace kv
