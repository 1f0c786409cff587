// Each row's mean, variance and Λ-shape (lines 3 to 8), for any dtype and head size.
#include "kernels/decompose-attention/decompose-attention.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kSide = 128;           // rows and columns of the part of a matrix to which a thread block adds products
constexpr int kChunkKeys = 32;
constexpr int kWarpRows = 8;
constexpr int kPassRows = kWarps * kWarpRows;
constexpr float kLowest = -3e38f;  // finite, so that infinities are never subtracted

// Adds the products of `count` keys in shared memory, [key, dim], to the part of a matrix that begins at (top, left).
__device__ void add_products(float* matrix, int dims, int top, int left, const float* keys, int count, bool fresh) {
  constexpr int kTile = kSide / 16;
  const int row = static_cast<int>(threadIdx.x) / 16;
  const int column = static_cast<int>(threadIdx.x) % 16;
  float sums[kTile][kTile] = {};
  for (int key = 0; key < count; ++key) {
    float of_rows[kTile];
    float of_columns[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      const int r = top + row + 16 * i;
      const int c = left + column + 16 * i;
      of_rows[i] = r < dims ? keys[key * dims + r] : 0;
      of_columns[i] = c < dims ? keys[key * dims + c] : 0;
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) sums[i][j] += of_rows[i] * of_columns[j];
    }
  }
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      const int r = top + row + 16 * i;
      const int c = left + column + 16 * j;
      if (r >= dims || c >= dims) continue;
      float& to = matrix[r * dims + c];
      to = fresh ? sums[i][j] : to + sums[i][j];
    }
  }
}

// Loads keys, [key, dim], and subtracts their centre.
template <class T>
__device__ void load_keys(const Launch& launch, const StoredKeys<T>& keys, const double* centre, int32_t first, int count,
                          float* to) {
  const int dims = launch.a.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < count * dims; i += kThreads) {
    to[i] = to_float(keys.at(first + i / dims)[i % dims]) - static_cast<float>(centre[i % dims]);
  }
}

// One thread block for each run of rows, kv head and part of the matrix.
template <class T>
__global__ void __launch_bounds__(kThreads) add_run(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ float chunk[];
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int run = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int parts = (a.head_dim + kSide - 1) / kSide;
  const int part = static_cast<int>(blockIdx.z);
  const int64_t sums = int64_t{head} * (launch.runs + 1) + run;
  float* moments = launch.memory.moments + sums * a.head_dim * a.head_dim;
  const double* centre = launch.layout().centre(a.state, head);
  const StoredKeys<T> keys(a, head);
  const int32_t end = launch.run_end(interior, run);
  bool fresh = true;
  for (int32_t first = launch.run_first(interior, run); first < end || fresh; first += kChunkKeys) {
    const int count = max(0, min(end - first, kChunkKeys));
    __syncthreads();
    load_keys(launch, keys, centre, first, count, chunk);
    __syncthreads();
    add_products(moments, a.head_dim, part / parts * kSide, part % parts * kSide, chunk, count, fresh);
    fresh = false;
  }
}

// The statistics of one row, over the keys of this lane.
struct LaneRow {
  float sum = 0;
  float square = 0;
  float peak = kLowest;
  float total = 0;

  __device__ void add_shape(float logit) {
    const float most = logit > peak ? logit : peak;
    total = total * __expf(peak - most) + __expf(logit - most);
    peak = most;
  }
};

// Computes the rows of one run and kv head. A row is a token and one of the query heads that share the keys. Each
// lane has kChunks dims.
template <class T, class Q, int kChunks>
__global__ void __launch_bounds__(kThreads) add_rows(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ float shared[];
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int dims = a.head_dim;
  const int stride = kChunks * kWarp + 1;
  float* queries = shared;                       // [row, stride]
  float* keys_here = queries + kPassRows * stride;  // [key, stride]
  float* sum = keys_here + kChunkKeys * stride;  // [dim]
  const int run = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const int group = a.group();
  const int64_t sums = int64_t{head} * (launch.runs + 1) + run;
  float* moments = launch.memory.moments + sums * dims * dims;
  const double* centre = launch.layout().centre(a.state, head);
  const StoredKeys<T> keys(a, head);
  float* own_queries = queries + thread / kWarp * kWarpRows * stride;
  const int32_t before = interior.end(interior.first_row + run * kRunTokens);
  for (int d = thread; d < dims; d += kThreads) {
    double all = launch.key_sums_before(head, before / kTurnTokens)[d];
    for (int32_t key = max(before / kTurnTokens * kTurnTokens, launch.first_key(interior)); key < before; ++key) {
      all += static_cast<double>(to_float(keys.at(key)[d]) - static_cast<float>(centre[d]));
    }
    sum[d] = static_cast<float>(all);
  }

  const int end = min(a.rows, (run + 1) * kRunTokens);
  for (int first = run * kRunTokens; first < end; first += kTileTokens) {
    const int tokens = min(kTileTokens, end - first);
    const int32_t first_row = interior.first_row + first;
    const int32_t band = interior.end(first_row);
    const int32_t band_end = first_row + tokens;
    const int32_t sinks = min(interior.sinks, a.tokens);
    for (int pass = 0; pass < tokens * group; pass += kPassRows) {
      __syncthreads();
      for (int i = thread; i < kPassRows * kChunks * kWarp; i += kThreads) {
        const int row = pass + i / (kChunks * kWarp);
        const int d = i % (kChunks * kWarp);
        const bool real = row < tokens * group && d < dims;
        queries[i / (kChunks * kWarp) * stride + d] =
            real ? to_float(query_at<Q>(a, first + row / group, head * group + row % group)[d]) * a.scale : 0;
      }
      __syncthreads();
      LaneRow rows[kWarpRows];
      {
        float own[kWarpRows][kChunks];
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
          for (int k = 0; k < kChunks; ++k) own[r][k] = own_queries[r * stride + k * kWarp + lane];
        }
        for (int d = 0; d < dims; ++d) {
          float line[kChunks];
#pragma unroll
          for (int k = 0; k < kChunks; ++k) line[k] = k * kWarp + lane < dims ? moments[d * dims + k * kWarp + lane] : 0;
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) {
            float product = 0;
#pragma unroll
            for (int k = 0; k < kChunks; ++k) product += line[k] * own[r][k];
            rows[r].square += own_queries[r * stride + d] * product;
          }
        }
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
#pragma unroll
          for (int k = 0; k < kChunks; ++k) rows[r].sum += k * kWarp + lane < dims ? sum[k * kWarp + lane] * own[r][k] : 0;
        }
      }
      // The sinks, then the keys that are new to the tile. A lane has one key of each chunk.
      const int32_t chunks = (sinks + kChunkKeys - 1) / kChunkKeys + (band_end - band + kChunkKeys - 1) / kChunkKeys;
      for (int32_t chunk = 0; chunk < chunks; ++chunk) {
        const int32_t of_sinks = (sinks + kChunkKeys - 1) / kChunkKeys;
        const bool sink = chunk < of_sinks;
        const int32_t first_key = sink ? chunk * kChunkKeys : band + (chunk - of_sinks) * kChunkKeys;
        const int count = min((sink ? sinks : band_end) - first_key, kChunkKeys);
        __syncthreads();
        for (int i = thread; i < count * dims; i += kThreads) {
          keys_here[i / dims * stride + i % dims] =
              to_float(keys.at(first_key + i / dims)[i % dims]) - static_cast<float>(centre[i % dims]);
        }
        __syncthreads();
        if (lane >= count) continue;
        float logits[kWarpRows] = {};
        for (int d = 0; d < dims; ++d) {
          const float key = keys_here[lane * stride + d];
#pragma unroll
          for (int r = 0; r < kWarpRows; ++r) logits[r] += own_queries[r * stride + d] * key;
        }
        const int32_t key = first_key + lane;
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) {
          const int32_t position = first_row + (pass + thread / kWarp * kWarpRows + r) / group;
          if (key > position) continue;
          const bool shape = sink || key > position - interior.diagonal;
          const bool wide = a.formulas == DecompositionFormulas::paper || interior.count(position) == 0;
          if (!shape || wide) {
            rows[r].sum += logits[r];
            rows[r].square += logits[r] * logits[r];
          }
          if (shape) rows[r].add_shape(logits[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const int row = pass + thread / kWarp * kWarpRows + r;
        const float total_sum = warp_sum(rows[r].sum);
        const float total_square = warp_sum(rows[r].square);
        float peak = rows[r].peak;
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
          const float other = __shfl_xor_sync(0xffffffffu, peak, distance);
          peak = other > peak ? other : peak;
        }
        const float total = warp_sum(rows[r].total * __expf(rows[r].peak - peak));
        if (lane != 0 || row >= tokens * group) continue;
        const int32_t position = first_row + row / group;
        const int32_t inside = interior.count(position);
        const bool wide = a.formulas == DecompositionFormulas::paper || inside == 0;
        const float counted = static_cast<float>(wide ? position + 1 : inside);
        const float mean = total_sum / counted;
        const float variance = total_square / counted - mean * mean;
        const int64_t to = int64_t{head * group + row % group} * a.rows + first + row / group;
        if (position == a.tokens - 1) launch.memory.last_means[head * group + row % group] = mean;
        launch.memory.variance[to] = variance > 0 || variance != variance ? variance : 0;
        launch.memory.log_shape[to] = peak - mean + logf(total);
      }
    }
    // The next tile's first row has these keys in its interior too, so they are added to the sums.
    const int32_t next = interior.end(first_row + tokens);
    for (int32_t from = band; from < next; from += kChunkKeys) {
      const int count = min(next - from, kChunkKeys);
      __syncthreads();
      load_keys(launch, keys, centre, from, count, keys_here);
      __syncthreads();
      for (int top = 0; top < dims; top += kSide) {
        for (int left = 0; left < dims; left += kSide) add_products(moments, dims, top, left, keys_here, count, false);
      }
      for (int d = thread; d < dims; d += kThreads) {
        for (int i = 0; i < count; ++i) sum[d] += keys_here[i * dims + d];
      }
    }
    __syncthreads();
  }
}

template <class T, class Q, int kChunks>
Status launch_rows(const Launch& launch) {
  const int stride = kChunks * kWarp + 1;
  const size_t bytes = static_cast<size_t>((kPassRows + kChunkKeys) * stride + launch.a.head_dim) * sizeof(float);
  const auto kernel = add_rows<T, Q, kChunks>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return cuda_status(error);
  kernel<<<dim3(static_cast<unsigned>(launch.runs), launch.kv_heads()), kThreads, bytes, launch.stream>>>(launch);
  return launch_status();
}

template <class T, class Q>
Status launch_rows_of(const Launch& launch) {
  if (launch.a.head_dim <= 2 * kWarp) return launch_rows<T, Q, 2>(launch);
  if (launch.a.head_dim <= 4 * kWarp) return launch_rows<T, Q, 4>(launch);
  return launch_rows<T, Q, 8>(launch);
}

}  // namespace

Status add_rows(const Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  const unsigned parts = static_cast<unsigned>((a.head_dim + kSide - 1) / kSide);
  const size_t chunk = static_cast<size_t>(kChunkKeys) * static_cast<size_t>(a.head_dim) * sizeof(float);
  Status status;
  with_cuda_float_type(a.cache_dtype, [&](auto element) {
    using T = decltype(element);
    const dim3 runs(static_cast<unsigned>(launch.runs) + 1, launch.kv_heads(), parts * parts);
    add_run<T><<<runs, kThreads, chunk, launch.stream>>>(launch);
    status = add_up_runs(launch);
    if (!status.ok()) return;
    with_cuda_float_type(a.query_dtype, [&](auto query) { status = launch_rows_of<T, decltype(query)>(launch); });
  });
  return status;
}

}  // namespace decomposition
}  // namespace kv
