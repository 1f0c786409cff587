// Observation scores of any dtype, head size and number of queries, without tensor cores. They serve whatever the
// tensor-core kernels do not take, and devices that those kernels are not built for. A thread block multiplies tiles
// of kKeys keys by kRows queries of one head. A lane has two keys, a warp four queries.
#include "kernels/observation-scores/observation-scores-head.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpRows = 4;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kLaneKeys = 2;
constexpr int kKeys = kLaneKeys * kWarp;
constexpr int kDims = 64;  // dims of rows and keys in shared memory at a time
constexpr float kLog2E = 1.44269504f;

template <class Q, class C>
class Tile {
 public:
  __device__ Tile(const ObservationScoresArguments& a, const ObservedHead& head)
      : a_(a),
        head_(head),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        warp_(static_cast<int>(threadIdx.x) / kWarp) {}

  __device__ int key(int tile, int i) const { return tile * kKeys + i * kWarp + lane_; }
  __device__ int query(int chunk, int i) const { return chunk * kRows + warp_ * kWarpRows + i; }

  // The scores of this thread's queries and keys, as exponents of 2.
  __device__ void score(int query_head, int chunk, int tile, float (&scores)[kWarpRows][kLaneKeys]) const {
    __shared__ float queries[kRows][kDims];
    __shared__ float keys[kKeys][kDims + 1];
    for (auto& row : scores) row[0] = row[1] = 0.0f;
    for (int first = 0; first < a_.head_dim; first += kDims) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < kRows * kDims; i += kThreads) {
        const int query = chunk * kRows + i / kDims;
        const int dim = first + i % kDims;
        const bool present = query < head_.queries && dim < a_.head_dim;
        const int64_t from = (head_.first_token + query) * a_.query_token_stride + query_head * a_.query_head_stride;
        queries[i / kDims][i % kDims] = present ? to_float(static_cast<const Q*>(a_.query)[from + dim]) : 0.0f;
      }
      for (int i = static_cast<int>(threadIdx.x); i < kKeys * kDims; i += kThreads) {
        const int key = tile * kKeys + i / kDims;
        const int dim = first + i % kDims;
        float value = 0.0f;
        if (key < head_.seen_keys && dim < a_.head_dim) {
          const int64_t block = head_.blocks[key / a_.block_tokens];
          const int64_t from = block * a_.block_stride + key % a_.block_tokens * a_.token_stride;
          value = to_float(static_cast<const C*>(a_.keys)[from + dim]);
        }
        keys[i / kDims][i % kDims] = value;
      }
      __syncthreads();
#pragma unroll 8
      for (int dim = 0; dim < kDims; ++dim) {
        for (int i = 0; i < kWarpRows; ++i) {
          const float query = queries[warp_ * kWarpRows + i][dim];
          for (int j = 0; j < kLaneKeys; ++j) scores[i][j] += query * keys[j * kWarp + lane_][dim];
        }
      }
    }
    for (auto& row : scores) {
      for (float& score : row) score *= a_.scale * kLog2E;
    }
  }

 private:
  const ObservationScoresArguments& a_;
  const ObservedHead& head_;
  const int lane_;
  const int warp_;
};

__device__ int tiles_of(int keys) { return (keys + kKeys - 1) / kKeys; }
__device__ int chunks_of(int queries) { return (queries + kRows - 1) / kRows; }

// First pass: the statistics of every query over the keys of this thread block.
template <class Q, class C>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(const __grid_constant__ ObservationScoresArguments a, ObservationScoresLaunch launch) {
  const ObservedHead head(a, static_cast<int>(blockIdx.y));
  const Tile<Q, C> thread(a, head);
  const PartOf tiles(tiles_of(head.seen_keys), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  const int group = a.query_heads / a.kv_heads;
  const int chunks = chunks_of(head.queries);
  for (int step = 0; step < group * chunks; ++step) {
    const int query_head = head.kv_head * group + step / chunks;
    const int chunk = step % chunks;
    // Each lane keeps the statistics of its own keys until the end.
    RowStatistics own[kWarpRows];
    for (RowStatistics& row : own) row = {-INFINITY, 0.0f};
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      float scores[kWarpRows][kLaneKeys];
      thread.score(query_head, chunk, tile, scores);
      for (int i = 0; i < kWarpRows; ++i) {
        for (int j = 0; j < kLaneKeys; ++j) {
          if (thread.key(tile, j) >= head.visible(thread.query(chunk, i))) continue;
          own[i] = merged(own[i], {scores[i][j], 1.0f});
        }
      }
    }
    for (int i = 0; i < kWarpRows; ++i) {
      own[i] = merged_across_warp(own[i]);
      const int query = thread.query(chunk, i);
      if (threadIdx.x % kWarp == 0 && query < head.queries) {
        statistics_of(a, launch, static_cast<int>(blockIdx.x), query_head, head.first_token + query) = own[i];
      }
    }
  }
}

// The weights of key threadIdx.x of a tile, reduced over the heads, computed from their logarithms. Few tiles need
// this.
template <class Q, class C>
__device__ __noinline__ RowStatistics small_weights(const ObservationScoresArguments& a,
                                                    const ObservationScoresLaunch& launch, int tile) {
  __shared__ RowStatistics of_warps[kWarps][kKeys];
  const ObservedHead head(a, static_cast<int>(blockIdx.y));
  const Tile<Q, C> thread(a, head);
  const int group = a.query_heads / a.kv_heads;
  RowStatistics total = {-INFINITY, 0.0f};
  for (int query_head = head.kv_head * group; query_head < (head.kv_head + 1) * group; ++query_head) {
    RowStatistics own[kLaneKeys] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    for (int chunk = 0; chunk < chunks_of(head.queries); ++chunk) {
      float scores[kWarpRows][kLaneKeys];
      thread.score(query_head, chunk, tile, scores);
      for (int i = 0; i < kWarpRows; ++i) {
        const int query = thread.query(chunk, i);
        if (query >= head.queries) continue;
        const float log_sum = log_sum_of(a, launch, query_head, head.first_token + query);
        for (int j = 0; j < kLaneKeys; ++j) own[j] = merged(own[j], {scores[i][j] - log_sum, 1.0f});
      }
    }
    __syncthreads();
    for (int j = 0; j < kLaneKeys; ++j) {
      of_warps[threadIdx.x / kWarp][j * kWarp + static_cast<int>(threadIdx.x) % kWarp] = own[j];
    }
    __syncthreads();
    if (threadIdx.x >= kKeys) continue;
    RowStatistics sum = {-INFINITY, 0.0f};
    for (const auto& of_warp : of_warps) sum = merged(sum, of_warp[threadIdx.x]);
    if (a.reduction != GroupReduction::maximum) {
      total = merged(total, sum);
    } else if (sum.reference + log2f(sum.sum) > total.reference + log2f(total.sum)) {
      total = sum;
    }
  }
  return total;
}

// Second pass: the scores of the keys of this thread block.
template <class Q, class C>
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor)
    weights_kernel(const __grid_constant__ ObservationScoresArguments a, ObservationScoresLaunch launch) {
  __shared__ float warp_sums[kWarps][kKeys];
  const ObservedHead head(a, static_cast<int>(blockIdx.y));
  const Tile<Q, C> thread(a, head);
  const PartOf tiles(tiles_of(head.prefix), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  if (blockIdx.x == 0 && threadIdx.x == 0) check_room(a, launch, head);
  const int group = a.query_heads / a.kv_heads;
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    float total = 0.0f;  // of key threadIdx.x
    for (int query_head = head.kv_head * group; query_head < (head.kv_head + 1) * group; ++query_head) {
      float sums[kLaneKeys] = {};
      for (int chunk = 0; chunk < chunks_of(head.queries); ++chunk) {
        float scores[kWarpRows][kLaneKeys];
        thread.score(query_head, chunk, tile, scores);
        for (int i = 0; i < kWarpRows; ++i) {
          const int query = thread.query(chunk, i);
          if (query >= head.queries) continue;
          const float log_sum = log_sum_of(a, launch, query_head, head.first_token + query);
          for (int j = 0; j < kLaneKeys; ++j) sums[j] += exp2f(scores[i][j] - log_sum);
        }
      }
      __syncthreads();
      for (int j = 0; j < kLaneKeys; ++j) {
        warp_sums[threadIdx.x / kWarp][j * kWarp + static_cast<int>(threadIdx.x) % kWarp] = sums[j];
      }
      __syncthreads();
      if (threadIdx.x < kKeys) {
        float sum = 0.0f;
        for (const auto& of_warp : warp_sums) sum += of_warp[threadIdx.x];
        total = a.reduction == GroupReduction::maximum ? fmaxf(total, sum) : total + sum;
      }
    }
    const float divisor = a.reduction == GroupReduction::mean ? static_cast<float>(group) : 1.0f;
    float score = total / divisor;
    const int key = tile * kKeys + static_cast<int>(threadIdx.x);
    const bool writes = threadIdx.x < kKeys && key < min(head.prefix, a.score_tokens);
    if (__syncthreads_or(writes && score < kSmallScore)) {
      const RowStatistics small = small_weights<Q, C>(a, launch, tile);
      if (score < kSmallScore) score = scaled_score(small.sum / divisor, small.reference);
    }
    if (writes) head.scores[key] = score;
  }
}

// Calls body with values of the C++ types that store queries and keys.
template <class Body>
Status with_types(const ObservationScoresArguments& a, Body&& body) {
  with_cuda_float_type(a.query_dtype, [&](auto query) {
    with_cuda_float_type(a.cache_dtype, [&](auto cached) { body(query, cached); });
  });
  return launch_status();
}

dim3 blocks_of(const ObservationScoresArguments& a, const ObservationScoresLaunch& launch) {
  return {static_cast<unsigned>(launch.parts), static_cast<unsigned>(a.batch * a.kv_heads)};
}

}  // namespace

Status gather_statistics(const ObservationScoresArguments& a, const ObservationScoresLaunch& launch) {
  return with_types(a, [&](auto query, auto cached) {
    statistics_kernel<decltype(query), decltype(cached)>
        <<<blocks_of(a, launch), kThreads, 0, launch.stream>>>(a, launch);
  });
}

Status add_up_weights(const ObservationScoresArguments& a, const ObservationScoresLaunch& launch) {
  return with_types(a, [&](auto query, auto cached) {
    weights_kernel<decltype(query), decltype(cached)>
        <<<blocks_of(a, launch), kThreads, 0, launch.stream>>>(a, launch);
  });
}

}  // namespace kv
