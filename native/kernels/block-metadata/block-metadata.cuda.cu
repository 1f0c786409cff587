#include "kernels/block-metadata/block-metadata.h"
#include "ptx/dependent-launch.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/block-checksum.cuda.h"
#include "shared/paged/entry-blocks.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 128;
constexpr int kTokensAtOnce = 32;  // keys of a dim that are loaded before the first is used

template <class T>
__device__ void describe_dim(const BlockMetadataArguments& a, const T* keys, T* to) {
  const auto tokens = static_cast<float>(a.block_tokens);
  const auto for_each_key = [&](auto use) {
#pragma unroll kTokensAtOnce
    for (int token = 0; token < a.block_tokens; ++token) use(to_float(keys[token * a.token_stride]));
  };
  float sum = 0, least = to_float(keys[0]), most = least;
  for_each_key([&](float key) {
    sum = __fadd_rn(sum, key);
    least = key < least ? key : least;
    most = key > most ? key : most;
  });
  if (a.method == BlockMetadataMethod::mean) {
    *to = from_float<T>(__fdiv_rn(sum, tokens));
    return;
  }
  if (a.method == BlockMetadataMethod::cuboid_mean) {
    const float mid = __fmul_rn(__fadd_rn(least, most), 0.5f);
    float distances = 0;
    for_each_key([&](float key) { distances = __fadd_rn(distances, key < mid ? __fsub_rn(mid, key) : __fsub_rn(key, mid)); });
    const float half = __fdiv_rn(distances, tokens);
    least = __fsub_rn(mid, half);
    most = __fadd_rn(mid, half);
  }
  to[0] = from_float<T>(least);
  to[a.head_dim] = from_float<T>(most);
}

// A thread block describes every gridDim.x-th block that its entry filled. A thread has every 128th dim.
template <class T>
__global__ void __launch_bounds__(kThreads) describe_blocks(const __grid_constant__ BlockMetadataArguments a, const FaultSink faults) {
  ptx::follow_previous_kernel();
  const EntryBlocks entry(a, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), faults);
  if (entry.rows == 0) return;
  const FilledBlocks filled(entry.tokens, entry.rows, a.block_tokens);
  for (int index = filled.first + static_cast<int>(blockIdx.x); index < filled.end; index += static_cast<int>(gridDim.x)) {
    const int64_t at = entry.cache_head * a.table_width + index;
    const int32_t block = checked_block(a.block_table[at], a.block_count, faults);
    const int32_t described = checked_block(a.metadata_table[at], a.metadata_blocks, faults);
    if (block < 0 || described < 0) continue;
    const T* keys = static_cast<const T*>(a.keys) + block * a.block_stride;
    T* to = static_cast<T*>(a.metadata) + int64_t{described} * metadata_vectors(a.method) * a.head_dim;
    for (int dim = static_cast<int>(threadIdx.x); dim < a.head_dim; dim += kThreads) describe_dim(a, keys + dim, to + dim);
    if (a.checksums == nullptr) continue;
    constexpr int kHalves = sizeof(T) / 2;
    const T* values = static_cast<const T*>(a.values) + block * a.block_stride;
    const uint32_t sum = cuda::checksum_of<kThreads>(reinterpret_cast<const uint16_t*>(keys), reinterpret_cast<const uint16_t*>(values),
                                                     a.block_tokens, a.token_stride * kHalves, a.head_dim * kHalves);
    if (threadIdx.x == 0) a.checksums[described] = sum;
  }
}

}  // namespace

Status block_metadata_cuda(const BlockMetadataArguments& a, ExecutionContext& context) {
  constexpr int kMostParts = 1024;
  const int most = a.query_tokens / a.block_tokens + 1;
  const dim3 blocks(static_cast<unsigned>(most < kMostParts ? most : kMostParts), static_cast<unsigned>(a.kv_heads),
                    static_cast<unsigned>(a.batch));
  const FaultSink faults = context.faults(describe_paged_fault);
  Status status;
  with_cuda_float_type(a.cache_dtype, [&](auto element) {
    status = launch_overlapped(describe_blocks<decltype(element)>, blocks, dim3(kThreads), 0, stream_of(context), a, faults);
  });
  return status;
}

}  // namespace kv
