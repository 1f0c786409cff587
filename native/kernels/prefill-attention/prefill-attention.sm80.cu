// Prefill attention for Ampere and Ada. Each thread block has 128 queries of one head, 16 in each warp. The key tiles
// pass, one after another, through two stages of asynchronous copies.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "runtime/check.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/attention/warp-attention.cuda.h"
#include "shared/attention/work-tile.cuda.h"

namespace kv::sm80 {
namespace {

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

// Starts this thread's share of the copies of one key tile. Rows that do not exist become zeros.
template <typename Element, int kHeadDim>
__device__ void request_tile(const PagedAttentionArguments& arguments, const PrefillTile& work,
                             const int32_t* key_table, const int32_t* value_table, int key_tile,
                             Stage<Element, kHeadDim>& stage) {
  constexpr int kChunks = kHeadDim / 8;
  constexpr int kRowsAtOnce = kThreads / kChunks;
  const int chunk = threadIdx.x % kChunks;
#pragma unroll
  for (int i = 0; i < kKeyTile; i += kRowsAtOnce) {
    const int row = i + threadIdx.x / kChunks;
    const int token = key_tile * kKeyTile + row;
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

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    prefill_attention_kernel(const __grid_constant__ PagedAttentionArguments arguments, const int32_t* value_table) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto* stages = reinterpret_cast<Stage<Element, kHeadDim>*>(shared_memory);
  PrefillTile work;
  if (!PrefillWork<kQueryTile, kKeyTile>(arguments).find(blockIdx.x, &work)) return;

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
  int key_tile = work.key_tiles - 1;
  if (key_tile >= 0) request_tile(arguments, work, key_table, value_table, key_tile, stages[key_tile % 2]);
  for (; key_tile >= 0; --key_tile) {
    ptx::async_copy_wait<0>();
    __syncthreads();  // after this, the tile has landed, and no thread reads the other stage any more
    if (key_tile > 0) request_tile(arguments, work, key_table, value_table, key_tile - 1, stages[(key_tile - 1) % 2]);
    auto& stage = stages[key_tile % 2];
    attention.step(stage.keys, stage.values, key_tile * kKeyTile, (key_tile + 1) * kKeyTile > fewest_visible);
  }
  attention.finish();
  store(arguments, work, first_row, attention);
}

template <typename Element, int kHeadDim>
Status launch(const PagedAttentionArguments& arguments, const int32_t* value_table, cudaStream_t stream) {
  const auto kernel = prefill_attention_kernel<Element, kHeadDim>;
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

template <typename Element>
Status launch_for_head_dim(const PagedAttentionArguments& arguments, const int32_t* value_table,
                           cudaStream_t stream) {
  return arguments.head_dim == 64 ? launch<Element, 64>(arguments, value_table, stream)
                                  : launch<Element, 128>(arguments, value_table, stream);
}

}  // namespace

Status prefill_attention(const PagedAttentionArguments& arguments, const int32_t* value_table,
                         cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, 1)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core prefill attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  return arguments.cache_dtype == DType::f16
             ? launch_for_head_dim<__half>(arguments, value_table, stream)
             : launch_for_head_dim<__nv_bfloat16>(arguments, value_table, stream);
}

}  // namespace kv::sm80
