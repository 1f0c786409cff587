// The parts s, v and h (lines 14 to 19), and the last row, for which the estimate of the denominator is made exact.
#include <cub/block/block_scan.cuh>

#include "kernels/decompose-attention/decompose-attention.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kScanThreads = 512;
constexpr int kScanItems = 8;

// Without samples there is no interior, and nothing to estimate.
__device__ const double* solution_of(const Launch& launch, int query_head) {
  return launch.memory.solutions + int64_t{query_head} * launch.a.coefficients();
}

// Line 14: one thread block for each 64 lags and query head.
__global__ void __launch_bounds__(kTurnTokens) write_slash(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ double2 turned[];  // [pair]: alpha rotated by the thread block's first lag
  const DecomposeAttentionArguments& a = launch.a;
  const int query_head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int lag = static_cast<int>(blockIdx.x) * kTurnTokens + thread;
  float* to = a.slash + int64_t{query_head} * a.tokens + lag;
  if (launch.samples == 0) {
    if (lag < a.tokens) *to = 0;
    return;
  }
  const double* alpha = solution_of(launch, query_head);
  const double* middle = launch.memory.middles + int64_t{query_head / a.group()} * a.coefficients();
  for (int pair = thread; pair < a.pairs; pair += kTurnTokens) {
    const double2 base = launch.memory.bases[int64_t{blockIdx.x} * a.pairs + pair];
    const double of_cosine = alpha[pair];
    const double of_sine = alpha[a.pairs + pair];
    turned[pair] = {of_cosine * base.x - of_sine * base.y, -(of_cosine * base.y + of_sine * base.x)};
  }
  __syncthreads();
  double value = 0;
  for (int pair = 0; pair < a.pairs; ++pair) {
    const double2 within = launch.memory.turns[pair * kTurnTokens + thread];
    value += within.x * turned[pair].x + within.y * turned[pair].y;
    value -= middle[pair] * alpha[pair] + middle[a.pairs + pair] * alpha[a.pairs + pair];
  }
  if (lag < a.tokens) *to = static_cast<float>(value);
}

// Line 15, and the last row of line 6: one thread block for each 64 keys and kv head. A thread has one key and some
// query heads.
template <class T, class Q>
__global__ void __launch_bounds__(kThreads) write_vertical(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ float keys_here[];  // [key, dim + 1]
  __shared__ float peaks[kThreads];
  __shared__ float totals[kThreads];
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int block = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int first = block * kTurnTokens;
  const int count = min(kTurnTokens, a.tokens - first);
  const int stride = a.head_dim + 1;
  const int own = thread % kTurnTokens;
  constexpr int kHeads = kThreads / kTurnTokens;  // query heads at once
  const StoredKeys<T> keys(a, head);
  const double* middle = launch.memory.middles + int64_t{head} * a.coefficients() + 2 * a.pairs;
  for (int i = thread; i < count * a.head_dim; i += kThreads) {
    const int token = i / a.head_dim;
    keys_here[token * stride + i % a.head_dim] = plain_of(launch, keys.at(first + token), first + token, i % a.head_dim);
  }
  __syncthreads();
  for (int g = thread / kTurnTokens; g < a.group(); g += kHeads) {
    const int query_head = head * a.group() + g;
    const double* kappa = solution_of(launch, query_head) + 2 * a.pairs;
    double value = 0;
    for (int d = 0; d < a.head_dim && launch.samples > 0 && own < count; ++d) {
      value += (static_cast<double>(keys_here[own * stride + d]) - middle[d]) * kappa[d];
    }
    if (own < count) a.vertical[int64_t{query_head} * a.tokens + first + own] = static_cast<float>(value);
  }
  __syncthreads();
  const double* centre = launch.layout().centre(a.state, head);
  for (int i = thread; i < count * a.head_dim; i += kThreads) {
    const int token = i / a.head_dim;
    const int d = i % a.head_dim;
    keys_here[token * stride + d] = to_float(keys.at(first + token)[d]) - static_cast<float>(centre[d]);
  }
  const int key = first + own;
  const bool inside = own < count && key >= interior.sinks && key < interior.end(a.tokens - 1);
  for (int g = thread / kTurnTokens; g < (a.group() + kHeads - 1) / kHeads * kHeads; g += kHeads) {
    const int query_head = head * a.group() + min(g, a.group() - 1);
    const Q* query = query_at<Q>(a, a.rows - 1, query_head);
    float logit = -INFINITY;
    __syncthreads();
    if (inside) {
      logit = -launch.memory.mean[int64_t{query_head} * a.rows + a.rows - 1];
      for (int d = 0; d < a.head_dim; ++d) logit += to_float(query[d]) * a.scale * keys_here[own * stride + d];
    }
    peaks[thread] = logit;
    __syncthreads();
    for (int half = kTurnTokens / 2; half > 0; half /= 2) {
      if (own < half) peaks[thread] = peaks[thread + half] > peaks[thread] ? peaks[thread + half] : peaks[thread];
      __syncthreads();
    }
    const float peak = peaks[thread - own];
    totals[thread] = inside ? expf(logit - peak) : 0;
    __syncthreads();
    for (int half = kTurnTokens / 2; half > 0; half /= 2) {
      if (own < half) totals[thread] += totals[thread + half];
      __syncthreads();
    }
    if (own == 0 && g < a.group()) {
      launch.memory.last_rows[int64_t{query_head} * launch.blocks() + block] = {peak, totals[thread]};
    }
  }
}

// Running sums of the slash part or the vertical part of one query head.
__global__ void __launch_bounds__(kScanThreads) add_up_parts(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  using Scan = cub::BlockScan<double, kScanThreads>;
  __shared__ typename Scan::TempStorage storage;
  const DecomposeAttentionArguments& a = launch.a;
  const int64_t query_head = blockIdx.x;
  const float* from = (blockIdx.y == 0 ? a.slash : a.vertical) + query_head * a.tokens;
  double* to = (blockIdx.y == 0 ? launch.memory.slash_sums : launch.memory.vertical_sums) + query_head * (a.tokens + 1);
  double before = 0;
  if (threadIdx.x == 0) to[0] = 0;
  for (int64_t first = 0; first < a.tokens; first += kScanThreads * kScanItems) {
    double values[kScanItems];
    const int64_t own = first + int64_t{threadIdx.x} * kScanItems;
    for (int i = 0; i < kScanItems; ++i) values[i] = own + i < a.tokens ? static_cast<double>(from[own + i]) : 0;
    double all = 0;
    Scan(storage).InclusiveSum(values, values, all);
    for (int i = 0; i < kScanItems; ++i) {
      if (own + i < a.tokens) to[own + i + 1] = before + values[i];
    }
    before += all;
    __syncthreads();
  }
}

// Line 16: one warp for each query head.
__global__ void __launch_bounds__(kWarp) find_zetas(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int64_t query_head = blockIdx.x;
  const double2* parts = launch.memory.last_rows + query_head * launch.blocks();
  double peak = -INFINITY;
  double total = 0;
  for (int i = static_cast<int>(threadIdx.x); i < launch.blocks(); i += kWarp) {
    const double2 part = parts[i];
    if (part.y == 0) continue;
    const double most = part.x > peak ? part.x : peak;
    total = (total == 0 ? 0 : total * exp(peak - most)) + part.y * exp(part.x - most);
    peak = most;
  }
  double most = peak;
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const double other = __shfl_xor_sync(0xffffffffu, most, distance);
    most = other > most ? other : most;
  }
  total = total == 0 ? 0 : total * exp(peak - most);
  for (int distance = kWarp / 2; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffffu, total, distance);
  if (threadIdx.x != 0) return;
  const double variance = launch.memory.variance[query_head * a.rows + a.rows - 1];
  const double count = a.formulas == DecompositionFormulas::paper ? 1 : interior.count(a.tokens - 1);
  launch.memory.zetas[query_head] = variance / 2 - (most + log(total)) + log(count);
}

// Lines 17 to 19.
__global__ void __launch_bounds__(kThreads) write_horizontal(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int64_t query_head = blockIdx.y;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= a.rows) return;
  const int row = interior.first_row + i;
  const int count = interior.count(row);
  const int end = interior.end(row);
  const int sinks = interior.sinks;
  const double shape = launch.memory.log_shape[query_head * a.rows + i];
  double value = -shape;
  if (count > 0) {
    const double* of_lags = launch.memory.slash_sums + query_head * (a.tokens + 1);
    const double* of_keys = launch.memory.vertical_sums + query_head * (a.tokens + 1);
    const double drift = a.formulas == DecompositionFormulas::paper
                             ? of_lags[end] - of_lags[sinks > 0 ? sinks - 1 : 0]
                             : of_lags[row - sinks + 1] - of_lags[interior.diagonal] + of_keys[end] - of_keys[sinks];
    const double variance = launch.memory.variance[query_head * a.rows + i];
    const double inside = log(static_cast<double>(count)) + variance / 2 - launch.memory.zetas[query_head];
    const double high = shape < inside ? inside : shape;
    const double low = shape < inside ? shape : inside;
    value = -drift / count - (high + log1p(exp(low - high)));
  }
  a.horizontal[query_head * a.rows + i] = static_cast<float>(value);
}

}  // namespace

Status write_parts(const Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  const unsigned blocks = static_cast<unsigned>(launch.blocks());
  const size_t pairs = static_cast<size_t>(a.pairs) * sizeof(double2);
  write_slash<<<dim3(blocks, launch.query_heads()), kTurnTokens, pairs, launch.stream>>>(launch);
  const size_t bytes = static_cast<size_t>(kTurnTokens) * static_cast<size_t>(a.head_dim + 1) * sizeof(float);
  cudaError_t error = cudaSuccess;
  with_cuda_float_type(a.cache_dtype, [&](auto element) {
    with_cuda_float_type(a.query_dtype, [&](auto query) {
      const auto kernel = write_vertical<decltype(element), decltype(query)>;
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
      if (error == cudaSuccess) kernel<<<dim3(blocks, launch.kv_heads()), kThreads, bytes, launch.stream>>>(launch);
    });
  });
  if (error != cudaSuccess) return cuda_status(error);
  add_up_parts<<<dim3(launch.query_heads(), 2), kScanThreads, 0, launch.stream>>>(launch);
  if (launch.samples > 0) find_zetas<<<launch.query_heads(), kWarp, 0, launch.stream>>>(launch);
  const unsigned rows = static_cast<unsigned>((a.rows + kThreads - 1) / kThreads);
  write_horizontal<<<dim3(rows, launch.query_heads()), kThreads, 0, launch.stream>>>(launch);
  return launch_status();
}

}  // namespace decomposition
}  // namespace kv
