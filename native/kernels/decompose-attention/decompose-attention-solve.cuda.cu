// Computes the samples, the normal equations and their solution (lines 1 and 9 to 13), in f64.
#include "kernels/decompose-attention/decompose-attention.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kTile = 64;  // rows and columns of a thread block's part of the Gram matrix
constexpr int kDepth = 16;
constexpr int kPanel = 16;  // columns that are factored together
constexpr int kSolveThreads = 512;

// One thread for each sample and pair.
__global__ void __launch_bounds__(kThreads) draw_samples(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t sample = index / a.pairs;
  const int pair = static_cast<int>(index % a.pairs);
  if (sample >= launch.samples) return;
  const InteriorSample drawn = interior.sample(static_cast<int32_t>(sample), launch.samples, a.seed);
  if (pair == 0) launch.memory.samples[sample] = drawn;
  // r(lag) minus its mean over the interior of the row, in closed form (line 9).
  const double2 turn = turn_of(launch, drawn.row - drawn.key, pair);
  const double half = static_cast<double>(a.inverse_frequencies[pair]) / 2;
  const double count = interior.count(drawn.row);
  const double divisor = sin(half);
  const double size = divisor == 0 ? 1 : sin(count * half) / (count * divisor);
  double sine;
  double cosine;
  sincos((static_cast<double>(interior.diagonal) + (drawn.row - interior.sinks)) * half, &sine, &cosine);
  double* line = launch.memory.angles + sample * 2 * a.pairs;
  line[pair] = turn.x - size * cosine;
  line[a.pairs + pair] = -turn.y + size * sine;
}

// Line 12: one warp for each sample and kv head.
template <class T, class Q>
__global__ void __launch_bounds__(kThreads) find_wanted(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int sample = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (sample >= launch.samples) return;
  const InteriorSample drawn = launch.memory.samples[sample];
  const T* key = StoredKeys<T>(a, head).at(drawn.key);
  const double* centre = launch.layout().centre(a.state, head);
  const int row = drawn.row - interior.first_row;
  bool finite = true;
  for (int g = 0; g < a.group(); ++g) {
    const int query_head = head * a.group() + g;
    const Q* query = query_at<Q>(a, row, query_head);
    float logit = 0;
    for (int d = lane; d < a.head_dim; d += kWarp) {
      logit += to_float(query[d]) * a.scale * (to_float(key[d]) - static_cast<float>(centre[d]));
    }
    logit = warp_sum(logit) - launch.memory.mean[int64_t{query_head} * a.rows + row];
    finite = finite && isfinite(logit);
    if (lane == 0) launch.memory.wanted[int64_t{query_head} * launch.samples + sample] = static_cast<double>(logit);
  }
  if (lane != 0) return;
  launch.memory.left_out[int64_t{head} * launch.samples + sample] = finite ? 0 : 1;
  for (int g = 0; g < a.group() && !finite; ++g) {
    launch.memory.wanted[(int64_t{head} * a.group() + g) * launch.samples + sample] = 0;
  }
}

// The index of the first sample of `row` or of a later row. Samples are in the order of their rows.
__device__ int first_sample(const Launch& launch, int32_t row) {
  int below = 0;
  for (int above = launch.samples; below < above;) {
    const int middle = (below + above) / 2;
    if (launch.memory.samples[middle].row < row) {
      below = middle + 1;
    } else {
      above = middle;
    }
  }
  return below;
}

// Line 11: one thread block for each run and kv head, and one thread for each dim. A thread goes through the run's
// keys once.
template <class T>
__global__ void __launch_bounds__(kMostDims) make_regressors(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int run = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int dim = static_cast<int>(threadIdx.x);
  const StoredKeys<T> keys(a, head);
  const int64_t n = a.coefficients();
  const bool real = dim < a.head_dim;
  double sum = real ? launch.memory.plain_sums[(int64_t{head} * (launch.runs + 1) + run) * a.head_dim + dim] : 0;
  int32_t summed = launch.run_end(interior, run);
  const int32_t end_row = min(a.tokens, interior.first_row + (run + 1) * kRunTokens);
  const int end = first_sample(launch, end_row);
  for (int sample = first_sample(launch, interior.first_row + run * kRunTokens); sample < end; ++sample) {
    const InteriorSample drawn = launch.memory.samples[sample];
    double* line = launch.memory.regressors + (int64_t{head} * launch.samples + sample) * n;
    const bool left_out = launch.memory.left_out[int64_t{head} * launch.samples + sample] != 0;
    for (int i = dim; i < 2 * a.pairs; i += static_cast<int>(blockDim.x)) {
      line[i] = left_out ? 0 : launch.memory.angles[int64_t{sample} * 2 * a.pairs + i];
    }
    if (!real) continue;
    for (; summed < interior.end(drawn.row); ++summed) sum += static_cast<double>(plain_of(launch, keys.at(summed), summed, dim));
    const double own = static_cast<double>(plain_of(launch, keys.at(drawn.key), drawn.key, dim));
    line[2 * a.pairs + dim] = left_out ? 0 : own - sum / interior.count(drawn.row);
  }
}

// The samples of a split are first_of_split(split) .. first_of_split(split + 1) - 1.
__device__ int64_t first_of_split(const Launch& launch, int split) { return int64_t{launch.samples} * split / kSplits; }

// One thread block for each tile of the lower triangle, kv head and split.
__global__ void __launch_bounds__(kThreads) multiply_regressors(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  __shared__ double left[kDepth][kTile + 1];
  __shared__ double right[kDepth][kTile + 1];
  const int n = launch.a.coefficients();
  int row_tile = 0;
  int column_tile = static_cast<int>(blockIdx.x);
  for (; column_tile > row_tile; ++row_tile) column_tile -= row_tile + 1;
  const int head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x);
  const double* lines = launch.memory.regressors + int64_t{head} * launch.samples * n;
  double sums[4][4] = {};
  const int64_t end = first_of_split(launch, split + 1);
  for (int64_t first = first_of_split(launch, split); first < end; first += kDepth) {
    __syncthreads();
    for (int i = thread; i < kDepth * kTile; i += kThreads) {
      const int64_t sample = first + i / kTile;
      const int row = row_tile * kTile + i % kTile;
      const int column = column_tile * kTile + i % kTile;
      left[i / kTile][i % kTile] = sample < end && row < n ? lines[sample * n + row] : 0;
      right[i / kTile][i % kTile] = sample < end && column < n ? lines[sample * n + column] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += left[depth][thread / 16 + 16 * i] * right[depth][thread % 16 + 16 * j];
      }
    }
  }
  double* to = launch.memory.gram_parts + (int64_t{split} * launch.a.kv_heads + head) * n * n;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int row = row_tile * kTile + thread / 16 + 16 * i;
      const int column = column_tile * kTile + thread % 16 + 16 * j;
      if (row < n && column <= row) to[int64_t{row} * n + column] = sums[i][j];
    }
  }
}

// The right sides: one thread block for some columns, a query head and a split.
__global__ void __launch_bounds__(kThreads) multiply_wanted(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const int n = launch.a.coefficients();
  const int column = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int query_head = static_cast<int>(blockIdx.y);
  const int split = static_cast<int>(blockIdx.z);
  if (column >= n) return;
  const double* lines = launch.memory.regressors + int64_t{query_head / launch.a.group()} * launch.samples * n;
  const double* wanted = launch.memory.wanted + int64_t{query_head} * launch.samples;
  double sum = 0;
  const int64_t end = first_of_split(launch, split + 1);
  for (int64_t sample = first_of_split(launch, split); sample < end; ++sample) sum += wanted[sample] * lines[sample * n + column];
  launch.memory.right_parts[(int64_t{split} * launch.a.query_heads + query_head) * n + column] = sum;
}

// Adds this call's part to the sums of earlier calls, and writes the system to solve. An element is in a row of the
// matrix, or in a right side.
__global__ void __launch_bounds__(kThreads) add_up_systems(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const int64_t n = a.coefficients();
  const int64_t row = blockIdx.x;
  const int64_t head = blockIdx.y;
  const bool matrix = row < n;
  const int64_t query_head = head * a.group() + row - n;
  const DecompositionState layout = launch.layout();
  double* kept = matrix ? layout.gram(a.state, head) + row * n : layout.right_side(a.state, query_head);
  const double* parts = matrix ? launch.memory.gram_parts + (head * n + row) * n : launch.memory.right_parts + query_head * n;
  const int64_t apart = matrix ? a.kv_heads * n * n : a.query_heads * n;
  double* to = launch.memory.systems + (head * (n + a.group()) + row) * n;
  for (int64_t column = threadIdx.x; column < n && (!matrix || column <= row); column += kThreads) {
    double sum = 0;
    for (int split = 0; split < kSplits && launch.samples > 0; ++split) sum += parts[split * apart + column];
    sum = (a.seen_tokens > 0 ? kept[column] : 0) + launch.weight * sum;
    kept[column] = sum;
    to[column] = sum;
  }
}

// The trace of a system. Every thread of the block gets it.
__device__ double block_trace(const double* system, int n) {
  __shared__ double sums[kSolveThreads];
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = 0;
  for (int i = thread; i < n; i += kSolveThreads) sums[thread] += system[int64_t{i} * n + i];
  for (int half = kSolveThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  __syncthreads();
  return sums[0];
}

// Factors the square of a panel, in one warp. Each lane has one row.
__device__ void factor_square(double (&square)[kPanel][kPanel + 1], int size) {
  const int row = static_cast<int>(threadIdx.x);
  for (int column = 0; column < size; ++column) {
    const double root = sqrt(square[column][column]);
    __syncwarp();
    if (row == column) square[row][column] = root;
    if (row > column && row < size) square[row][column] /= root;
    __syncwarp();
    for (int k = column + 1; k <= row && row < size; ++k) square[row][k] -= square[row][column] * square[k][column];
    __syncwarp();
  }
}

// Line 13: one thread block for each kv head factors the matrix (Cholesky, in panels of columns). The right sides are
// further rows of the matrix, so the factorisation turns them into their forward solutions.
__global__ void __launch_bounds__(kSolveThreads) solve_systems(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  __shared__ double square[kPanel][kPanel + 1];
  const DecomposeAttentionArguments& a = launch.a;
  const int n = a.coefficients();
  const int rows = n + a.group();
  const int head = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const int warp = thread / kWarp;
  double* system = launch.memory.systems + int64_t{head} * rows * n;
  const double ridge = a.ridge * a.ridge / 4 * block_trace(system, n);
  __syncthreads();
  for (int i = thread; i < n; i += kSolveThreads) system[int64_t{i} * n + i] += ridge;
  for (int first = 0; first < n; first += kPanel) {
    const int size = min(kPanel, n - first);
    const int next = first + size;
    __syncthreads();
    for (int i = thread; i < kPanel * kPanel; i += kSolveThreads) {
      const int row = i / kPanel;
      const int column = i % kPanel;
      if (row < size && column <= row) square[row][column] = system[int64_t{first + row} * n + first + column];
    }
    __syncthreads();
    if (warp == 0) factor_square(square, size);
    __syncthreads();
    for (int i = thread; i < kPanel * kPanel; i += kSolveThreads) {
      const int row = i / kPanel;
      const int column = i % kPanel;
      if (row < size && column <= row) system[int64_t{first + row} * n + first + column] = square[row][column];
    }
    for (int row = next + thread; row < rows; row += kSolveThreads) {
      double* line = system + int64_t{row} * n + first;
      double solved[kPanel];
#pragma unroll
      for (int j = 0; j < kPanel; ++j) {
        if (j >= size) continue;
        double rest = line[j];
#pragma unroll
        for (int k = 0; k < j; ++k) rest -= solved[k] * square[j][k];
        solved[j] = rest / square[j][j];
        line[j] = solved[j];
      }
    }
    __syncthreads();
    // Updates the rest of the matrix, in tiles of 32 x 32 of the lower triangle. A warp has a tile, and each of its
    // lanes a column.
    const int tiles = (rows - next + kWarp - 1) / kWarp;
    for (int index = warp; index < tiles * (tiles + 1) / 2; index += kSolveThreads / kWarp) {
      int row_tile = 0;
      int column_tile = index;
      for (; column_tile > row_tile; ++row_tile) column_tile -= row_tile + 1;
      const int column = next + column_tile * kWarp + lane;
      double of_column[kPanel];
#pragma unroll
      for (int k = 0; k < kPanel; ++k) of_column[k] = column < n && k < size ? system[int64_t{column} * n + first + k] : 0;
      const int end = min(rows, next + (row_tile + 1) * kWarp);
      for (int row = next + row_tile * kWarp; row < end; ++row) {
        const double* line = system + int64_t{row} * n + first;
        double product = 0;
#pragma unroll
        for (int k = 0; k < kPanel; ++k) product += k < size ? line[k] * of_column[k] : 0;
        if (column < n && column <= row) system[int64_t{row} * n + column] -= product;
      }
    }
  }
  __syncthreads();
  // Solves backwards, one warp for each right side.
  for (int g = warp; g < a.group(); g += kSolveThreads / kWarp) {
    double* solution = system + int64_t{n + g} * n;
    for (int row = n - 1; row >= 0; --row) {
      const double* line = system + int64_t{row} * n;
      const double value = solution[row] / line[row];
      __syncwarp();
      for (int k = lane; k < row; k += kWarp) solution[k] -= line[k] * value;
      if (lane == 0) solution[row] = value;
      __syncwarp();
    }
    double* to = launch.memory.solutions + (int64_t{head} * a.group() + g) * n;
    for (int k = lane; k < n; k += kWarp) to[k] = solution[k];
  }
}

// The means over the last row's interior (lines 9 and 10).
__global__ void __launch_bounds__(kThreads) find_middles(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int head = static_cast<int>(blockIdx.x);
  const int n = a.coefficients();
  const double count = interior.count(a.tokens - 1);
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
    double middle = 0;
    if (i >= 2 * a.pairs) {
      const int64_t last = int64_t{head} * (launch.runs + 1) + launch.runs;
      middle = launch.memory.plain_sums[last * a.head_dim + i - 2 * a.pairs] / count;
    } else {
      const double half = static_cast<double>(a.inverse_frequencies[i % a.pairs]) / 2;
      const double divisor = sin(half);
      const double size = divisor == 0 ? 1 : sin(count * half) / (count * divisor);
      const double angle = -(static_cast<double>(interior.diagonal) + (a.tokens - 1 - interior.sinks)) * half;
      middle = size * (i < a.pairs ? cos(angle) : sin(angle));
    }
    launch.memory.middles[int64_t{head} * n + i] = middle;
  }
}

unsigned blocks_for(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

}  // namespace

Status solve_least_squares(const Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  const int n = a.coefficients();
  if (launch.samples > 0) {
    draw_samples<<<blocks_for(int64_t{launch.samples} * a.pairs), kThreads, 0, launch.stream>>>(launch);
    with_cuda_float_type(a.cache_dtype, [&](auto element) {
      using T = decltype(element);
      const dim3 warps(static_cast<unsigned>((launch.samples + kWarps - 1) / kWarps), launch.kv_heads());
      with_cuda_float_type(a.query_dtype, [&](auto query) {
        find_wanted<T, decltype(query)><<<warps, kThreads, 0, launch.stream>>>(launch);
      });
      const unsigned threads = static_cast<unsigned>((a.head_dim + kWarp - 1) / kWarp * kWarp);
      make_regressors<T><<<dim3(static_cast<unsigned>(launch.runs), launch.kv_heads()), threads, 0, launch.stream>>>(launch);
    });
    const unsigned side = static_cast<unsigned>((n + kTile - 1) / kTile);
    multiply_regressors<<<dim3(side * (side + 1) / 2, launch.kv_heads(), kSplits), kThreads, 0, launch.stream>>>(launch);
    multiply_wanted<<<dim3(blocks_for(n), launch.query_heads(), kSplits), kThreads, 0, launch.stream>>>(launch);
  }
  add_up_systems<<<dim3(static_cast<unsigned>(n + a.group()), launch.kv_heads()), kThreads, 0, launch.stream>>>(launch);
  if (launch.samples > 0) {
    solve_systems<<<launch.kv_heads(), kSolveThreads, 0, launch.stream>>>(launch);
    find_middles<<<launch.kv_heads(), kThreads, 0, launch.stream>>>(launch);
  }
  return launch_status();
}

}  // namespace decomposition
}  // namespace kv
