// Prefill attention over dense and 2:4 blocks for Ampere and Ada. Each warp of a thread block has 24 query rows. The
// blocks of the cache pass, one after another, through two stages of asynchronous copies.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/prefill-attention-24/prefill-attention-24-warp.cuda.h"
#include "kernels/prefill-attention-24/prefill-attention-24-work.cuda.h"
#include "kernels/prefill-attention-24/prefill-attention-24.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "runtime/check.cuda.h"

namespace kv::sm80 {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kChunk = 8;  // elements in 16 bytes

template <typename Element, int kHeadDim>
constexpr int kTileRows = kWarps* PrefillWarp24<Element, kHeadDim>::kRows;

template <typename Element, int kHeadDim>
struct Stage {
  BlockStage24<Element, kHeadDim> keys;
  BlockStage24<Element, kHeadDim> values;
};

// Starts this thread's share of the copy of a block. Rows of dense blocks from `tokens` on become zeros.
template <typename Element, int kHeadDim>
__device__ void request(const Attention24Arguments& arguments, const void* dense, const SparseBlocks24& sparse,
                        int entry, int tokens, BlockStage24<Element, kHeadDim>& block) {
  if (!is_dense(entry)) {
    constexpr int kElements = sizeof(block.sparse_keys) / sizeof(Element);
    constexpr int kWords = sizeof(block.metadata) / sizeof(uint32_t);
    const int64_t index = block_number(entry);
    const Element* non_zeros = static_cast<const Element*>(sparse.non_zeros) + index * kElements;
    for (int i = threadIdx.x * kChunk; i < kElements; i += kThreads * kChunk) {
      ptx::async_copy_16(&block.sparse_keys[0][0] + i, non_zeros + i, true);
    }
    const uint32_t* metadata = sparse.metadata + index * kWords;
    for (int i = threadIdx.x * 4; i < kWords; i += kThreads * 4) {
      ptx::async_copy_16(&block.metadata[i], metadata + i, true);
    }
    return;
  }
  constexpr int kChunks = kHeadDim / kChunk;
  const Element* rows = static_cast<const Element*>(dense) + int64_t{entry} * arguments.block_stride;
  const int chunk = threadIdx.x % kChunks;
  for (int row = threadIdx.x / kChunks; row < kBlock24Tokens; row += kThreads / kChunks) {
    ptx::async_copy_16(swizzled_chunk(block.dense[chunk / 8], row, chunk % 8),
                       rows + row * arguments.token_stride + chunk * kChunk, row < tokens);
  }
}

template <typename Element, int kHeadDim>
__device__ void request(const Attention24Arguments& arguments, const PrefillTile24& tile, int number,
                        Stage<Element, kHeadDim>& stage) {
  const int64_t entry = int64_t{tile.cache_head} * arguments.table_width + number;
  const int tokens = tile.key_count - number * kBlock24Tokens;
  request(arguments, arguments.keys, arguments.sparse_keys, arguments.block_table[entry], tokens, stage.keys);
  request(arguments, arguments.values, arguments.sparse_values, arguments.value_table[entry], tokens, stage.values);
  ptx::async_copy_commit();
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    prefill_attention_24_kernel(const __grid_constant__ Attention24Arguments arguments) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto* stages = reinterpret_cast<Stage<Element, kHeadDim>*>(shared_memory);
  using Attention = PrefillWarp24<Element, kHeadDim>;
  PrefillTile24 tile;
  if (!PrefillWork24<kTileRows<Element, kHeadDim>>(arguments).find(blockIdx.x, &tile)) return;

  const int first_row = tile.first_row + threadIdx.x / 32 * Attention::kRows;
  const int64_t first_entry = int64_t{tile.cache_head} * arguments.table_width;
  Attention attention(arguments.scale);
  load_queries<Element>(arguments, tile, first_row, attention);
  const SeenBlocks blocks = tile.blocks(first_row, Attention::kRows);
  if (tile.key_blocks > 0) request(arguments, tile, 0, stages[0]);
  for (int number = 0; number < tile.key_blocks; ++number) {
    ptx::async_copy_wait<0>();
    __syncthreads();  // after this, the block has landed, and no thread reads the other stage any more
    if (number + 1 < tile.key_blocks) request(arguments, tile, number + 1, stages[(number + 1) % 2]);
    if (number >= blocks.seen) continue;
    auto& stage = stages[number % 2];
    weigh_keys(tile, first_row, number, number >= blocks.full, stage.keys,
               !is_dense(arguments.block_table[first_entry + number]), attention);
    attention.accumulate(stage.values, !is_dense(arguments.value_table[first_entry + number]));
  }
  attention.finish();
  store_outputs<Element>(arguments, tile, first_row, attention);
}

template <typename Element, int kHeadDim>
Status launch(const Attention24Arguments& arguments, cudaStream_t stream) {
  const auto kernel = prefill_attention_24_kernel<Element, kHeadDim>;
  constexpr int kSharedBytes = 2 * sizeof(Stage<Element, kHeadDim>);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return cuda_status(error);
  // An upper bound: only the device knows how many queries each entry has. Thread blocks beyond the last tile return
  // at once.
  const int64_t rows = int64_t{arguments.query_tokens} * arguments.query_heads;
  const int64_t tiles = rows / kTileRows<Element, kHeadDim> + int64_t{arguments.batch} * arguments.kv_heads;
  kernel<<<static_cast<unsigned>(tiles), kThreads, kSharedBytes, stream>>>(arguments);
  return launch_status();
}

template <typename Element>
Status launch_for_head_dim(const Attention24Arguments& arguments, cudaStream_t stream) {
  return arguments.head_dim == 64 ? launch<Element, 64>(arguments, stream)
                                  : launch<Element, 128>(arguments, stream);
}

}  // namespace

Status prefill_attention_24(const Attention24Arguments& arguments, cudaStream_t stream) {
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  return arguments.cache_dtype == DType::f16 ? launch_for_head_dim<__half>(arguments, stream)
                                             : launch_for_head_dim<__nv_bfloat16>(arguments, stream);
}

}  // namespace kv::sm80
