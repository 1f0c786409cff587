// Scores from quantized blocks of any shape, with one thread for each token. It serves whatever the tensor-core kernel does
// not take.
#include "kernels/quantized-key-scores/quantized-key-scores.cuda.h"
#include "shared/key-scores/entry-head.cuda.h"
#include "shared/quantized-blocks/quantized-blocks.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kColumns = 8;  // rows and heads that are scored at once
constexpr int kBlocks = 4;   // of a thread block
constexpr int kThreads = kBlocks * kQuantizedBlockTokens;
constexpr int kMostGroups = kMostQuantizedDims / kQuantizedGroupDims;

// A warp scales and rotates a column at a time. Columns beyond the last, and dims beyond the head, are zeros.
template <class Q>
__device__ void load_queries(const QuantizedKeyScoresArguments& a, const EntryHead& entry, int first,
                             float (&queries)[kMostQuantizedDims][kColumns]) {
  const int group_heads = a.query_heads / a.kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int column = static_cast<int>(threadIdx.x) / kWarp; column < kColumns; column += kThreads / kWarp) {
    const int number = first + column;
    const Q* query = static_cast<const Q*>(a.query) + (entry.first_row + number / group_heads) * a.query_token_stride +
                     (static_cast<int>(blockIdx.y) * group_heads + number % group_heads) * a.query_head_stride;
    float row[kMostGroups];
#pragma unroll
    for (int g = 0; g < kMostGroups; ++g) {
      const int dim = g * kWarp + lane;
      row[g] = number < entry.columns && dim < a.head_dim ? to_float(query[dim]) * a.scale : 0.0f;
    }
    if (a.rotated) rotate(row, a.head_dim);
#pragma unroll
    for (int g = 0; g < kMostGroups; ++g) queries[g * kWarp + lane][column] = row[g];
  }
}

template <class Q>
__global__ void __launch_bounds__(kThreads)
    score_tokens(const __grid_constant__ QuantizedKeyScoresArguments a, const FaultSink faults) {
  __shared__ float queries[kMostQuantizedDims][kColumns];
  const int head = static_cast<int>(blockIdx.y);
  const EntryHead entry(a, static_cast<int>(blockIdx.z), head, faults);
  const int group_heads = a.query_heads / a.kv_heads;
  const int groups = quantized_groups(a.head_dim);
  const int thread = static_cast<int>(threadIdx.x);
  const int token = thread % kQuantizedBlockTokens;
  for (int first = 0; first < entry.columns; first += kColumns) {
    __syncthreads();
    load_queries<Q>(a, entry, first, queries);
    __syncthreads();
    for (int index = static_cast<int>(blockIdx.x) * kBlocks + thread / kQuantizedBlockTokens; index < entry.blocks;
         index += static_cast<int>(gridDim.x) * kBlocks) {
      const int32_t number = entry.block(index, a.block_count, faults);
      if (number < 0) continue;
      const uint8_t* block = a.keys + number * quantized_block_bytes(a.head_dim, a.key_bits);
      const uint8_t* scales = block + scale_offset(a.head_dim, a.key_bits) + token * groups;
      const CodeRow codes(block, a.head_dim, a.key_bits, token);
      float sums[kColumns] = {};
      for (int group = 0; group < groups; ++group) {
        float products[kColumns] = {};
        for (int dim = 0; dim < kQuantizedGroupDims; ++dim) {
          const float steps = codes.steps(group, dim);
#pragma unroll
          for (int c = 0; c < kColumns; ++c) products[c] += steps * queries[group * kQuantizedGroupDims + dim][c];
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[c] += products[c] * scale_of(scales[group]);
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (first + c >= entry.columns) break;
        float* scores = a.scores + (entry.first_row + (first + c) / group_heads) * a.score_token_stride +
                        (head * group_heads + (first + c) % group_heads) * a.score_head_stride;
        scores[int64_t{index} * kQuantizedBlockTokens + token] = sums[c];
      }
    }
  }
}

}  // namespace

Status quantized_key_scores_any(const QuantizedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  constexpr int kMostSplits = 256;
  const int most = (a.table_width + kBlocks - 1) / kBlocks;
  const dim3 blocks(static_cast<unsigned>(most < 1 ? 1 : most < kMostSplits ? most : kMostSplits),
                    static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch));
  with_cuda_float_type(a.query_dtype, [&](auto query) {
    score_tokens<decltype(query)><<<blocks, kThreads, 0, stream>>>(a, faults);
  });
  return launch_status();
}

}  // namespace kv::cuda
