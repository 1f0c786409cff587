// Scores from codes of any shape, with one thread for each token. It serves whatever the tensor-core kernel does not take.
#include "kernels/coded-key-scores/coded-key-scores-ranges.cuda.h"
#include "shared/coded-keys/coded-keys.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kColumns = 8;  // rows and heads that are scored at once
constexpr int kBlocks = 4;   // coded blocks of a thread block
constexpr int kThreads = kBlocks * kCodedBlockTokens;

template <class Q>
__global__ void __launch_bounds__(kThreads)
    score_tokens(const __grid_constant__ CodedKeyScoresArguments a, const FaultSink faults) {
  __shared__ float queries[kMostCodedDims][kColumns];
  __shared__ float2 of_warps[kThreads / kWarp][kColumns];  // ranges
  const int head = static_cast<int>(blockIdx.y);
  const EntryHead entry(a, static_cast<int>(blockIdx.z), head, faults);
  const int group_heads = a.query_heads / a.kv_heads;
  const CodedKeys& coded = a.coded;
  const int thread = static_cast<int>(threadIdx.x);
  const int token = thread % kCodedBlockTokens;
  for (int first = 0; first < entry.columns; first += kColumns) {
    const int count = min(kColumns, entry.columns - first);
    __syncthreads();
    for (int i = thread; i < a.head_dim * kColumns; i += kThreads) {
      const int dim = i / kColumns, column = i % kColumns;
      float x = 0;
      if (column < count) {
        const Q* query = static_cast<const Q*>(a.query) + (entry.first_row + (first + column) / group_heads) * a.query_token_stride +
                         (head * group_heads + (first + column) % group_heads) * a.query_head_stride;
        x = to_float(query[dim]);
        if (coded.channel_scale != nullptr) x *= coded.channel_scale[int64_t{head} * a.head_dim + dim];
      }
      queries[dim][column] = x;
    }
    __syncthreads();
    ScoreRange ranges[kColumns];
    for (int index = static_cast<int>(blockIdx.x) * kBlocks + thread / kCodedBlockTokens; index < entry.blocks;
         index += static_cast<int>(gridDim.x) * kBlocks) {
      const int32_t number = entry.block(index, a.block_count, faults);
      if (number < 0) continue;
      const uint32_t* block = coded.block(number);
      const bool spoilt = (coded.spoilt(number)[token / 32] >> token % 32 & 1) != 0;
      float sums[kColumns] = {};
      for (int group = 0; group < coded.groups(); ++group) {
        const int64_t centroid = code_at(coded, block, token, group);
        const uint16_t* elements = coded.centroids + coded.book_offset(head, group) + centroid * coded.sub_dim;
        for (int d = 0; d < coded.sub_dim; ++d) {
          const float element = half_value(elements[d]);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sums[c] += element * queries[group * coded.sub_dim + d][c];
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c >= count) break;
        float* scores = a.scores + (entry.first_row + (first + c) / group_heads) * a.score_token_stride +
                        (head * group_heads + (first + c) % group_heads) * a.score_head_stride;
        const float score = spoilt ? NAN : sums[c] * a.scale;
        scores[int64_t{index} * kCodedBlockTokens + token] = score;
        ranges[c].add(score);
      }
    }
    if (a.ranges == nullptr) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      for (int distance = 1; distance < kWarp; distance *= 2) ranges[c].add_lane(distance);
      if (thread % kWarp == 0) of_warps[thread / kWarp][c] = ranges[c].both();
    }
    write_ranges(a, entry, head, first, of_warps);
  }
}

}  // namespace

Status coded_key_scores_any(const CodedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  constexpr int kMostSplits = 256;
  const int splits = a.ranges != nullptr && a.range_parts < kMostSplits ? a.range_parts : kMostSplits;
  const int most = (a.table_width + kBlocks - 1) / kBlocks;
  const dim3 blocks(static_cast<unsigned>(most < 1 ? 1 : most < splits ? most : splits),
                    static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch));
  with_cuda_float_type(a.query_dtype, [&](auto query) {
    score_tokens<decltype(query)><<<blocks, kThreads, 0, stream>>>(a, faults);
  });
  return launch_status();
}

}  // namespace kv::cuda
