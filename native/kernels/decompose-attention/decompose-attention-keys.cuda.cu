// Sums over keys, for any dtype and head size.
#include "kernels/decompose-attention/decompose-attention-lane-columns.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kCentreTokens = 1024;  // the centre is the mean of at most so many first keys
constexpr int kSegments = 32;        // of blocks, which a thread adds up apart
constexpr int kBatch = 8;            // loads that a thread has under way
constexpr int kProductBatch = 16;    // the same of products

template <class T>
__global__ void __launch_bounds__(kThreads) find_centre(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const int head = static_cast<int>(blockIdx.x);
  const int dim = static_cast<int>(blockIdx.y);
  const StoredKeys<T> keys(a, head);
  const int count = min(a.tokens, kCentreTokens);
  float sum = 0;
  for (int token = static_cast<int>(threadIdx.x); token < count; token += kThreads) sum += to_float(keys.at(token)[dim]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) launch.layout().centre(a.state, head)[dim] = static_cast<double>(sum / static_cast<float>(count));
}

// Adds up the keys of one block and kv head. A lane has kColumns columns of a key, where all do.
template <class T, int kColumns>
__global__ void __launch_bounds__(kThreads) add_blocks(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) char shared[];
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int32_t first_key = launch.first_key(interior);
  const int32_t block = first_key / kTurnTokens + static_cast<int32_t>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int32_t start = block * kTurnTokens;
  const int first = max(first_key - start, 0);
  const int end = min(interior.end(a.tokens - 1) - start, kTurnTokens);
  const KeyBlock<T> here(a, shared);
  copy_block(launch, StoredKeys<T>(a, head), start, first, end, here.keys);
  ptx::async_copy_wait<0>();
  __syncthreads();
  if constexpr (kColumns > 0) add_up_lanes(launch, LaneColumns<T, kColumns>(a), here, first, end);
  else here.add_up(launch, head, first, end);
  __syncthreads();
  double* to = launch.key_sums_before(head, block);
  for (int index = static_cast<int>(threadIdx.x); index < here.columns; index += kThreads) {
    double2 cached = {0, 0};
    double2 plain = {0, 0};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float2 of_cached = here.cached[group * here.columns + index];
      const double2 of_plain = here.plain[group * here.columns + index];
      cached = {cached.x + of_cached.x, cached.y + of_cached.y};
      plain = {plain.x + of_plain.x, plain.y + of_plain.y};
    }
    const Column column(a, index);
    to[column.first] = cached.x;
    to[a.head_dim + column.first] = plain.x;
    if (column.second < 0) continue;
    const double2 all = turned_back(plain, launch.memory.bases[int64_t{block} * a.pairs + index]);
    to[column.second] = cached.y;
    to[a.head_dim + column.first] = all.x;
    to[a.head_dim + column.second] = all.y;
  }
}

// Replaces the sums of blocks by those of all keys before each block, on top of the sum of earlier calls. A warp has
// neighbouring sums and a segment of the blocks.
__global__ void __launch_bounds__(kWarp* kSegments) add_up_blocks(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  __shared__ double totals[kSegments][kWarp];
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int segment = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t size = 2 * int64_t{a.head_dim};
  const int64_t element = int64_t{blockIdx.x} * kWarp + lane;
  const bool real = element < size;
  const int32_t first_block = launch.first_key(interior) / kTurnTokens;
  const int32_t count = (interior.end(a.tokens - 1) + kTurnTokens - 1) / kTurnTokens - first_block;
  double* sums = launch.key_sums_before(head, first_block) + element;
  const int32_t length = (count + kSegments - 1) / kSegments;
  const int32_t begin = min(segment * length, count);
  const int32_t end = real ? min(begin + length, count) : begin;
  double total = 0;
#pragma unroll kBatch
  for (int32_t block = begin; block < end; ++block) total += sums[block * size];
  totals[segment][lane] = total;
  __syncthreads();
  double* kept = launch.layout().key_sum(a.state, head) + element;
  double sum = real && a.seen_tokens > 0 ? *kept : 0;
  for (int earlier = 0; earlier < segment; ++earlier) sum += totals[earlier][lane];
  __syncthreads();
  for (int32_t block = begin; block < end; block += kBatch) {
    double own[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) own[i] = block + i < end ? sums[(block + i) * size] : 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (block + i < end) sums[(block + i) * size] = sum;
      sum += own[i];
    }
  }
  if (segment < kSegments - 1 || !real) return;
  sums[count * size] = sum;
  *kept = sum;
}

// Replaces the products of the runs by running sums, on top of those of earlier calls. One thread has one element.
__global__ void __launch_bounds__(kThreads) add_up_products(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const int head = static_cast<int>(blockIdx.y);
  const int64_t size = int64_t{a.head_dim} * a.head_dim;
  const int64_t element = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (element >= size) return;
  double* kept = launch.layout().moments(a.state, head) + element;
  float* products = launch.memory.moments + int64_t{head} * (launch.runs + 1) * size + element;
  double sum = a.seen_tokens > 0 ? *kept : 0;
  for (int32_t run = 0; run <= launch.runs; run += kProductBatch) {
    float own[kProductBatch];
#pragma unroll
    for (int i = 0; i < kProductBatch; ++i) own[i] = run + i <= launch.runs ? products[(run + i) * size] : 0;
#pragma unroll
    for (int i = 0; i < kProductBatch; ++i) {
      sum += static_cast<double>(own[i]);
      if (run + i <= launch.runs) products[(run + i) * size] = static_cast<float>(sum);
    }
  }
  *kept = sum;
}

}  // namespace

Status add_up_runs(const Launch& launch) {
  const unsigned elements = static_cast<unsigned>((launch.a.head_dim * launch.a.head_dim + kThreads - 1) / kThreads);
  add_up_products<<<dim3(elements, launch.kv_heads()), kThreads, 0, launch.stream>>>(launch);
  return launch_status();
}

Status add_keys(const Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const DecompositionState layout = launch.layout();
  if (a.seen_tokens == 0 && launch.tensor_cores) {
    // Products of 16-bit keys are exact, so they need no centre.
    const cudaError_t error = cudaMemset2DAsync(layout.centre(a.state, 0), static_cast<size_t>(layout.of_head()) * sizeof(double), 0,
                                                static_cast<size_t>(a.head_dim) * sizeof(double), launch.kv_heads(), launch.stream);
    if (error != cudaSuccess) return cuda_status(error);
  }
  const int32_t first_block = launch.first_key(interior) / kTurnTokens;
  const int32_t blocks = (interior.end(a.tokens - 1) + kTurnTokens - 1) / kTurnTokens - first_block;
  cudaError_t error = cudaSuccess;
  with_cuda_float_type(a.cache_dtype, [&](auto element) {
    using T = decltype(element);
    if (a.seen_tokens == 0 && !launch.tensor_cores) {
      find_centre<T><<<dim3(launch.kv_heads(), static_cast<unsigned>(a.head_dim)), kThreads, 0, launch.stream>>>(launch);
    }
    if (blocks <= 0) return;
    const auto kernel = [&] {
      if constexpr (sizeof(T) == 2) {
        if (has_whole_lanes(launch)) return a.pairs == kWarp ? add_blocks<T, 1> : add_blocks<T, 2>;
      }
      return add_blocks<T, 0>;
    }();
    const size_t bytes = KeyBlock<T>::bytes(a);
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return;
    kernel<<<dim3(static_cast<unsigned>(blocks), launch.kv_heads()), kThreads, bytes, launch.stream>>>(launch);
  });
  if (error != cudaSuccess) return cuda_status(error);
  const unsigned elements = static_cast<unsigned>(2 * a.head_dim + kWarp - 1) / kWarp;
  add_up_blocks<<<dim3(elements, launch.kv_heads()), kWarp * kSegments, 0, launch.stream>>>(launch);
  return launch_status();
}

}  // namespace decomposition
}  // namespace kv
