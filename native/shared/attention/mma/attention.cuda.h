// Attention for Ampere and Ada. Each thread block has 128 queries of one head, 16 in each warp. The key tiles pass, one
// after another, through two stages of asynchronous copies.
//
// `KeyTiles` says which keys a work tile reads. It has these members:
//   Arguments  PagedAttentionArguments, and what else its functions read.
//   Work       The numbering of the work tiles. Work::Tile is a PrefillTile.
//   count(work), first_key(work, i)   How many key tiles there are, and the first key of each, in ascending order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/async-copy.cuda.h"
#include "runtime/check.cuda.h"
#include "shared/attention/warp-attention.cuda.h"
#include "shared/attention/work-tile.cuda.h"

namespace kv::sm80 {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 16;
constexpr int kQueryTile = kWarpRows * kWarps;
constexpr int kKeyTile = 64;

template <typename Element, int kHeadDim>
struct Stage {
  Element keys[kKeyTile][kHeadDim];
  Element values[kKeyTile][kHeadDim];
};

// Starts this thread's share of the copies of the key tile that begins with `first_key`. Rows that do not exist become
// zeros.
template <typename Element, int kHeadDim>
__device__ void request_tile(const PagedAttentionArguments& arguments, const PrefillTile& work,
                             const int32_t* key_table, const int32_t* value_table, int first_key,
                             Stage<Element, kHeadDim>& stage) {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kRowsAtOnce = kThreads / kChunks;
  const int chunk = threadIdx.x % kChunks;
#pragma unroll
  for (int i = 0; i < kKeyTile; i += kRowsAtOnce) {
    const int row = i + threadIdx.x / kChunks;
    const int token = first_key + row;
    const bool present = token < work.key_count;
    int64_t key_offset = 0;
    int64_t value_offset = 0;
    if (present) {
      const int entry = token / arguments.block_tokens;
      const int64_t within = (token - entry * arguments.block_tokens) * arguments.token_stride + chunk * 8;
      key_offset = key_table[entry] * arguments.block_stride + within;
      value_offset = value_table[entry] * arguments.block_stride + within;
    }
    ptx::async_copy_16(swizzled_chunk(stage.keys, row, chunk),
                       static_cast<const Element*>(arguments.keys) + key_offset, present);
    ptx::async_copy_16(swizzled_chunk(stage.values, row, chunk),
                       static_cast<const Element*>(arguments.values) + value_offset, present);
  }
  ptx::async_copy_commit();
}

template <typename Element, int kHeadDim>
__device__ void store(const PagedAttentionArguments& arguments, const PrefillTile& work, int first_row,
                      const WarpAttention<Element, kHeadDim, kKeyTile>& attention) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int query = work.first_query + first_row + lane / 4 + 8 * half;
    if (query >= work.query_count) continue;
    const int64_t token = int64_t{work.first_row} + query;
    const OnlineSoftmax& softmax = attention.softmax();
    const float normalizer = OnlineSoftmax::normalizer(softmax.sum(half));
    Element* output = static_cast<Element*>(arguments.output) + token * arguments.output_token_stride +
                      work.query_head * arguments.output_head_stride + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const float2 pair = attention.output(half, i);
      *reinterpret_cast<uint32_t*>(output + 8 * i) =
          ptx::pack<Element>(pair.x * normalizer, pair.y * normalizer);
    }
    if (arguments.log_sum_exp != nullptr && lane % 4 == 0) {
      arguments.log_sum_exp[token * arguments.query_heads + work.query_head] =
          OnlineSoftmax::log_sum_exp(softmax.reference(half), softmax.sum(half));
    }
  }
}

template <typename Element, int kHeadDim, class KeyTiles>
__global__ void __launch_bounds__(kThreads)
    attention_kernel(const __grid_constant__ typename KeyTiles::Arguments arguments, const int32_t* value_table) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto* stages = reinterpret_cast<Stage<Element, kHeadDim>*>(shared_memory);
  typename KeyTiles::Work::Tile work;
  if (!typename KeyTiles::Work(arguments).find(blockIdx.x, &work)) return;

  const int lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * kWarpRows;
  WarpAttention<Element, kHeadDim, kKeyTile> attention(arguments.scale);
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + lane / 4 + 8 * half;
    const int query = work.first_query + row;
    const Element* rows =
        static_cast<const Element*>(arguments.query) + work.query_head * arguments.query_head_stride;
    attention.set_row(half,
                      query < work.query_count
                          ? rows + (int64_t{work.first_row} + query) * arguments.query_token_stride
                          : nullptr,
                      min(work.visible_keys + (arguments.causal ? row : 0), work.key_count));
  }

  const int64_t table_row = int64_t{work.slot} * arguments.kv_heads + work.kv_head;
  const int32_t* key_table = arguments.block_table + table_row * arguments.table_width;
  value_table += table_row * arguments.table_width;
  const int fewest_visible = min(work.visible_keys, work.key_count);
  int key_tile = KeyTiles::count(work) - 1;
  int first_key = key_tile >= 0 ? KeyTiles::first_key(work, key_tile) : 0;
  if (key_tile >= 0) request_tile(arguments, work, key_table, value_table, first_key, stages[key_tile % 2]);
  for (; key_tile >= 0; --key_tile) {
    const int next_key = key_tile > 0 ? KeyTiles::first_key(work, key_tile - 1) : 0;
    ptx::async_copy_wait<0>();
    __syncthreads();  // after this, the tile has landed, and no thread reads the other stage any more
    if (key_tile > 0) request_tile(arguments, work, key_table, value_table, next_key, stages[(key_tile - 1) % 2]);
    auto& stage = stages[key_tile % 2];
    attention.step(stage.keys, stage.values, first_key, first_key + kKeyTile > fewest_visible);
    first_key = next_key;
  }
  attention.finish();
  store(arguments, work, first_row, attention);
}

// Enqueues the kernel on `stream` and returns. The arguments pass fits_tensor_cores.
template <typename Element, int kHeadDim, class KeyTiles>
Status launch_attention(const typename KeyTiles::Arguments& arguments, const int32_t* value_table,
                        cudaStream_t stream) {
  const auto kernel = attention_kernel<Element, kHeadDim, KeyTiles>;
  constexpr int kSharedBytes = 2 * sizeof(Stage<Element, kHeadDim>);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return cuda_status(error);
  // An upper bound: only the device knows how many queries each entry has. Thread blocks beyond the last tile return
  // at once.
  const int64_t tiles =
      int64_t{arguments.query_heads} * (arguments.query_tokens / kQueryTile + arguments.batch);
  kernel<<<static_cast<unsigned>(tiles), kThreads, kSharedBytes, stream>>>(arguments, value_table);
  return launch_status();
}

}  // namespace kv::sm80
