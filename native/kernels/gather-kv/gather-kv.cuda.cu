#include "kernels/cuda-elements.h"
#include "kernels/gather-kv/gather-kv.h"

namespace kv {
namespace {

// Element offset in a pool of the token at `index` of a head whose blocks are `blocks`.
__device__ int64_t offset_of(const GatherKvArguments& a, const int32_t* blocks, int32_t index) {
  return blocks[index / a.block_tokens] * a.block_stride + index % a.block_tokens * a.token_stride;
}

// One block gathers one kv head, a tile of tokens at a time: every element of a tile is read before any is
// written, and a tile never writes behind what a later one reads, since indices ascend.
template <class T>
__global__ void gather_heads(GatherKvArguments a, FaultSink faults) {
  constexpr int kTile = 8;
  __shared__ int invalid;
  const int head = static_cast<int>(blockIdx.x);
  const int32_t* blocks = a.block_table + int64_t{head} * a.table_width;
  const int32_t* indices = a.indices + head * a.index_stride;
  const int32_t count = a.counts[head];
  if (threadIdx.x == 0) invalid = 0;
  __syncthreads();
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += static_cast<int32_t>(blockDim.x)) {
    const int32_t before = i == 0 ? -1 : indices[i - 1];
    if (indices[i] <= before || indices[i] >= a.key_counts[head]) invalid = 1;
  }
  __syncthreads();
  if (invalid != 0) {
    if (threadIdx.x == 0) report_fault(faults, FaultCode::selection_not_ascending, head);
    return;
  }
  T* const pools[] = {static_cast<T*>(a.key_pool), static_cast<T*>(a.value_pool)};
  for (int32_t first = 0; first < count; first += kTile) {
    const int32_t tokens = count - first < kTile ? count - first : kTile;
    for (int dim = static_cast<int>(threadIdx.x); dim < a.head_dim; dim += static_cast<int>(blockDim.x)) {
      T held[2][kTile];
      for (int pool = 0; pool < 2; ++pool) {
        for (int i = 0; i < tokens; ++i) held[pool][i] = pools[pool][offset_of(a, blocks, indices[first + i]) + dim];
      }
      for (int pool = 0; pool < 2; ++pool) {
        for (int i = 0; i < tokens; ++i) pools[pool][offset_of(a, blocks, first + i) + dim] = held[pool][i];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) a.key_counts[head] = count;
}

}  // namespace

Status gather_kv_cuda(const GatherKvArguments& a, ExecutionContext& context) {
  if (a.kv_heads == 0) return Status::success();
  with_cuda_float_type(a.cache_dtype, [&](auto element) {
    gather_heads<decltype(element)>
        <<<static_cast<unsigned>(a.kv_heads), 128, 0, stream_of(context)>>>(a, context.faults);
  });
  return launch_status();
}

}  // namespace kv
