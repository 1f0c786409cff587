// Vertical-slash block scores on a CUDA device, in four steps: denominators, lines, their maxima, scores. Nothing is
// added up in an order that may change.
#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores.h"

#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores-products.cuda.h"

#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores-lines.h"

namespace kv {
namespace {

using namespace prefill_block_scores;
using cuda::kProbedRows;
using cuda::kRunLags;
using cuda::kSplitKeys;
using cuda::kSplitLags;
using cuda::LineMaxima;
using cuda::most_or_nan;
using cuda::ProbedHead;

static_assert(kProbedRows == Products::kColumns, "the probed rows are the columns of the products");

struct Launch {
  PrefillBlockScoresArguments a;
  const int32_t* fits;
  LogSum* denominators;  // [query_head, split, probed row]
  float* verticals;      // [query_head, split, key]
  float* slashes;        // [query_head, split, lag]: what the keys of a split add
  float* maxima;         // [query_head, blocks and twice the runs]

  __device__ int splits() const { return ProbedHead::splits(a.blocks); }
  __device__ LineMaxima maxima_of(const ProbedHead& head) const {
    float* of = maxima + head.first.query_head * (a.blocks + 2 * head.runs());
    return {of, of + a.blocks, of + a.blocks + head.runs()};
  }
};

// Logits without their scale: the rows are 128 keys from `first_key` on, the columns are probed rows.
template <class Q, class K>
__device__ Products key_products(const PrefillBlockScoresArguments& a, const ProbedHead& head, int first_key,
                                 Products::Shared& shared) {
  Products products;
  products.add(
      shared, a.head_dim,
      [&](int d) {
        return [&a, &head, first_key, d](int key) {
          return first_key + key < head.first.tokens ? to_float(key_at<K>(a, head.first.blocks, first_key + key)[d]) : 0.0f;
        };
      },
      [&](int d) {
        return [&a, &head, d](int probe) {
          return probe < head.probed ? to_float(query_at<Q>(a, head.row(probe), head.first.query_head)[d]) : 0.0f;
        };
      });
  return products;
}

__device__ bool sees(const ProbedHead& head, int probe, int key) { return probe < head.probed && key <= head.position(probe); }

// One thread block for each split and query head.
template <class Q, class K>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ Launch launch) {
  __shared__ Products::Shared shared;
  __shared__ LogSum of_warps[4][kProbedRows];  // of 32 keys of each run
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const ProbedHead head(a, blockIdx.y);
  const int split = static_cast<int>(blockIdx.x);
  const int end = min((split + 1) * kSplitKeys, head.first.tokens);
  LogSum sums[4][2];  // of this thread's probed rows
  for (auto& pair : sums) pair[0] = pair[1] = LogSum::nothing();
  for (int first_key = split * kSplitKeys; first_key < end; first_key += Products::kRows) {
    const Products products = key_products<Q, K>(a, head, first_key, shared);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        float logits[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool seen = sees(head, Products::column_of(n, odd), first_key + Products::row_of(i / 2, i % 2));
          logits[i] = seen ? products.sums[i / 2][n][2 * (i % 2) + odd] * a.scale * kLog2E : -INFINITY;
        }
        sums[n][odd] = merged(sums[n][odd], sum_of<0>(logits));
      }
    }
  }
  for (int n = 0; n < 4; ++n) {
    for (int odd = 0; odd < 2; ++odd) {
      const LogSum sum = merged_across<4 | 8 | 16>(sums[n][odd]);
      if (threadIdx.x % kWarp < 4) of_warps[threadIdx.x / kWarp / 2][Products::column_of(n, odd)] = sum;
    }
  }
  __syncthreads();
  const int probe = static_cast<int>(threadIdx.x);
  if (probe >= kProbedRows) return;
  LogSum sum = of_warps[0][probe];
  for (int part = 1; part < 4; ++part) sum = merged(sum, of_warps[part][probe]);
  launch.denominators[(head.first.query_head * launch.splits() + split) * kProbedRows + probe] = sum;
}

template <class Q, class K>
__global__ void __launch_bounds__(kThreads) sum_lines(const __grid_constant__ Launch launch) {
  // Weights take the place of the elements that were multiplied.
  __shared__ union {
    Products::Shared elements;
    float weights[Products::kRows][kProbedRows + 1];
  } shared;
  __shared__ float denominators[kProbedRows];  // logarithms
  __shared__ float slashes[kSplitLags];
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const ProbedHead head(a, blockIdx.y);
  const int split = static_cast<int>(blockIdx.x);
  const int end = min((split + 1) * kSplitKeys, head.first.tokens);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t of_split = head.first.query_head * launch.splits() + split;
  if (thread < kProbedRows) {
    LogSum sum = LogSum::nothing();
    for (int other = 0; other < launch.splits(); ++other) {
      sum = merged(sum, launch.denominators[(head.first.query_head * launch.splits() + other) * kProbedRows + thread]);
    }
    denominators[thread] = sum.natural();
  }
  for (int lag = thread; lag < kSplitLags; lag += kThreads) slashes[lag] = 0;
  for (int first_key = split * kSplitKeys; first_key < end; first_key += Products::kRows) {
    const Products products = key_products<Q, K>(a, head, first_key, shared.elements);
    __syncthreads();
    products.for_each([&](int key, int probe, float product) {
      const bool seen = sees(head, probe, first_key + key);
      shared.weights[key][probe] = seen ? expf(product * a.scale - denominators[probe]) : 0.0f;
    });
    __syncthreads();
    if (thread < Products::kRows) {
      float sum = 0;
      for (int probe = 0; probe < kProbedRows; ++probe) sum += shared.weights[thread][probe];
      launch.verticals[of_split * kSplitKeys + first_key - split * kSplitKeys + thread] = sum;
    }
    // Each thread has lags of its own: those of key k and probed row p are p - k, and those of the last key come first.
    const int behind = (split + 1) * kSplitKeys - first_key - Products::kRows;
    for (int lag = thread; lag < Products::kRows + kProbedRows - 1; lag += kThreads) {
      float sum = slashes[behind + lag];
      for (int probe = max(0, lag - Products::kRows + 1); probe < kProbedRows && probe <= lag; ++probe) {
        sum += shared.weights[Products::kRows - 1 - lag + probe][probe];
      }
      slashes[behind + lag] = sum;
    }
  }
  __syncthreads();
  for (int lag = thread; lag < kSplitLags; lag += kThreads) launch.slashes[of_split * kSplitLags + lag] = slashes[lag];
}

// One thread for each block, and one for each run.
__global__ void __launch_bounds__(kThreads) find_maxima(const __grid_constant__ Launch launch) {
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const ProbedHead head(a, blockIdx.y);
  const LineMaxima maxima = launch.maxima_of(head);
  const float* verticals = launch.verticals + head.first.query_head * launch.splits() * kSplitKeys;
  const float* slashes = launch.slashes + head.first.query_head * launch.splits() * kSplitLags;
  const int index = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int run = index - a.blocks;
  float most = 0;
  if (index < a.blocks) {
    const int end = min((index + 1) * kScoredBlockKeys, head.first.tokens);
    for (int key = index * kScoredBlockKeys; key < end; ++key) most = most_or_nan(most, verticals[key]);
    maxima.verticals[index] = most;
  } else if (run < head.runs()) {
    const auto slash = [&](int lag) {
      float sum = 0;
      if (lag < 0 || lag >= head.first.tokens) return sum;
      for (int split = head.first_split(lag); split <= head.last_split(lag); ++split) {
        sum += slashes[split * kSplitLags + lag - head.first_lag(split)];
      }
      return sum;
    };
    const int lag = head.lag_of_run(run);
    for (int i = 0; i < kRunLags; ++i) most = most_or_nan(most, slash(lag + i));
    maxima.runs[run] = most;
    most = 0;
    for (int i = 1; i < kRunLags; ++i) most = most_or_nan(most, slash(lag - i));
    maxima.before[run] = most;
  }
}

// One thread block for each tile and query head.
__global__ void __launch_bounds__(kThreads) write_scores(const __grid_constant__ Launch launch) {
  if (*launch.fits == 0) return;
  const PrefillBlockScoresArguments& a = launch.a;
  const ProbedHead head(a, blockIdx.y);
  const LineMaxima maxima = launch.maxima_of(head);
  const int tile = static_cast<int>(blockIdx.x);
  const ScoredTile of(a, blockIdx.y, tile);
  for (int block = static_cast<int>(threadIdx.x); block < a.blocks; block += kThreads) {
    const float line = block < of.seen() ? maxima.of(head, tile, block) : 0;
    of.scores[block] = logf(line / static_cast<float>(head.probed));
  }
}

}  // namespace

Status vertical_slash_block_scores_cuda(const VerticalSlashBlockScoresArguments& given, ExecutionContext& context) {
  Launch launch{given, nullptr, nullptr, nullptr, nullptr, nullptr};
  const int splits = ProbedHead::splits(given.blocks);
  const int runs = ProbedHead::runs(given.tiles, given.blocks);
  const int64_t of_splits = int64_t{given.query_heads} * splits;
  const int64_t verticals = of_splits * kSplitKeys;
  const int64_t slashes = of_splits * kSplitLags;
  const int64_t maxima = int64_t{given.query_heads} * (given.blocks + 2 * runs);
  const size_t bytes = static_cast<size_t>(of_splits * kProbedRows) * sizeof(LogSum) +
                       static_cast<size_t>(verticals + slashes + maxima) * sizeof(float);
  BlockScoresMemory memory;
  const Status status = prepare_block_scores_cuda(launch.a, bytes, context, memory);
  if (!status.ok()) return status;
  launch.fits = memory.fits;
  launch.denominators = reinterpret_cast<LogSum*>(memory.rest);
  launch.verticals = reinterpret_cast<float*>(launch.denominators + of_splits * kProbedRows);
  launch.slashes = launch.verticals + verticals;
  launch.maxima = launch.slashes + slashes;
  cudaStream_t stream = stream_of(context);
  const unsigned heads = static_cast<unsigned>(given.query_heads);
  with_cuda_float_type(given.query_dtype, [&](auto query) {
    with_cuda_float_type(given.cache_dtype, [&](auto key) {
      using Q = decltype(query);
      using K = decltype(key);
      const dim3 of_head(static_cast<unsigned>(splits), heads);
      sum_rows<Q, K><<<of_head, kThreads, 0, stream>>>(launch);
      sum_lines<Q, K><<<of_head, kThreads, 0, stream>>>(launch);
    });
  });
  find_maxima<<<dim3(static_cast<unsigned>((given.blocks + runs + kThreads - 1) / kThreads), heads), kThreads, 0, stream>>>(launch);
  write_scores<<<dim3(static_cast<unsigned>(given.tiles), heads), kThreads, 0, stream>>>(launch);
  return launch_status();
}

}  // namespace kv
