// The least squares (line 13), in f64.
#include "kernels/decompose-attention/decompose-attention.cuda.h"
#include "ptx/mma-f64.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kPanel = 16;  // columns that are factored together
constexpr int kSolveThreads = 512;
constexpr int kSolveWarps = kSolveThreads / kWarp;
constexpr int kStride = kPanel + 1;
constexpr unsigned kAllLanes = 0xffffffffu;

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

// The means over the last row's interior (lines 9 and 10).
__device__ void find_middles(const Launch& launch, int head) {
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int n = a.coefficients();
  const int32_t end = interior.end(a.tokens - 1);
  const double count = interior.count(a.tokens - 1);
  const double* sums = launch.key_sums_before(head, (end + kTurnTokens - 1) / kTurnTokens) + a.head_dim;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kSolveThreads) {
    double middle = 0;
    if (i >= 2 * a.pairs) {
      middle = sums[i - 2 * a.pairs] / count;
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

// Writes the panel of columns that begins at `first`, without what the columns before it explain: [row, kStride]. A warp
// has 16 rows at a time.
__device__ void load_panel(const double* system, int n, int rows, int first, double ridge, double* panel) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int size = min(kPanel, n - first);
  for (int top = first + static_cast<int>(threadIdx.x) / kWarp * 16; top < rows; top += kSolveWarps * 16) {
    // Rows past the end repeat the last one, and are not written.
    const double* of_rows[2];
    const double* of_columns[2];
    for (int j = 0; j < 2; ++j) {
      of_rows[j] = system + int64_t{min(top + 8 * j + lane / 4, rows - 1)} * n + lane % 4;
      of_columns[j] = system + int64_t{min(first + 8 * j + lane / 4, n - 1)} * n + lane % 4;
    }
    double sums[2][4] = {};
#pragma unroll 4
    for (int k = 0; k < first; k += 8) {
      const double row[4] = {of_rows[0][k], of_rows[1][k], of_rows[0][k + 4], of_rows[1][k + 4]};
      for (int j = 0; j < 2; ++j) ptx::mma_m16n8k8(sums[j], row, {of_columns[j][k], of_columns[j][k + 4]});
    }
    for (int j = 0; j < 2; ++j) {
      for (int part = 0; part < 4; ++part) {
        const int row = top + part / 2 * 8 + lane / 4;
        const int column = 8 * j + lane % 4 * 2 + part % 2;
        const bool real = column < size && first + column <= row;
        if (row >= rows) continue;
        const double value = real ? system[int64_t{row} * n + first + column] - sums[j][part] : 0;
        panel[(row - first) * kStride + column] = value + (row == first + column ? ridge : 0);
      }
    }
  }
}

// Factors the square on top of a panel, in one warp. Each lane has one row, and writes the inverse of its diagonal.
// Columns past `size` are those of the unit matrix.
__device__ void factor_square(double* panel, int size, double* inverses) {
  const int row = static_cast<int>(threadIdx.x) % kPanel;
  double values[kPanel];
#pragma unroll
  for (int k = 0; k < kPanel; ++k) values[k] = row < size && k < size ? panel[row * kStride + k] : row == k;
#pragma unroll
  for (int column = 0; column < kPanel; ++column) {
    const double inverse = rsqrt(__shfl_sync(kAllLanes, values[column], column));
    values[column] *= inverse;
    if (row == column) inverses[column] = inverse;
#pragma unroll
    for (int k = column + 1; k < kPanel; ++k) values[k] -= values[column] * __shfl_sync(kAllLanes, values[column], k);
  }
  __syncwarp();  // two lanes have read each row
#pragma unroll
  for (int k = 0; k < kPanel; ++k) {
    if (row < size && k < size && threadIdx.x < kPanel) panel[row * kStride + k] = values[k];
  }
}

// Solves the other rows of a panel for the square. One thread has one row.
__device__ void solve_rows(double* panel, int size, int rows, const double* inverses) {
  for (int row = size + static_cast<int>(threadIdx.x); row < rows; row += kSolveThreads) {
    double values[kPanel];
#pragma unroll
    for (int k = 0; k < kPanel; ++k) values[k] = k < size ? panel[row * kStride + k] : 0;
#pragma unroll
    for (int column = 0; column < kPanel; ++column) {
      if (column >= size) break;
      values[column] *= inverses[column];
#pragma unroll
      for (int k = column + 1; k < kPanel; ++k) values[k] -= values[column] * (k < size ? panel[k * kStride + column] : 0);
    }
#pragma unroll
    for (int k = 0; k < kPanel; ++k) {
      if (k < size) panel[row * kStride + k] = values[k];
    }
  }
}

// Solves backwards, a square at a time. A warp solves the square of one right side; then all threads take what is
// solved out of the equations before. `solved`: [right side, kPanel].
__device__ void solve_backwards(double* system, int n, int group, double* solved) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  for (int first = (n - 1) / kPanel * kPanel; first >= 0; first -= kPanel) {
    const int size = min(kPanel, n - first);
    const int own = min(lane, size - 1);
    double column[kPanel];
#pragma unroll
    for (int k = 0; k < kPanel; ++k) column[k] = k < size ? system[int64_t{first + k} * n + first + min(own, k)] : 0;
    double diagonal = 1;
#pragma unroll
    for (int k = 0; k < kPanel; ++k) diagonal = k == own ? column[k] : diagonal;
    const double inverse = 1 / diagonal;
    for (int g = thread / kWarp; g < group; g += kSolveWarps) {
      double value = system[int64_t{n + g} * n + first + own];
#pragma unroll
      for (int k = kPanel - 1; k >= 0; --k) {
        if (k >= size) continue;
        const double known = __shfl_sync(kAllLanes, value * inverse, k);
        value = own == k ? known : own < k ? value - column[k] * known : value;
      }
      if (lane < size) system[int64_t{n + g} * n + first + lane] = solved[g * kPanel + lane] = value;
    }
    __syncthreads();
    for (int i = thread; i < first * group; i += kSolveThreads) {
      const int g = i / first;
      const int k = i % first;
      double taken = 0;
#pragma unroll
      for (int row = 0; row < kPanel; ++row) taken += row < size ? system[int64_t{first + row} * n + k] * solved[g * kPanel + row] : 0;
      system[int64_t{n + g} * n + k] -= taken;
    }
    __syncthreads();
  }
}

// One thread block for each kv head factors the matrix (Cholesky, in panels of columns). The right sides are further
// rows of the matrix, so the factorisation turns them into their forward solutions.
__global__ void __launch_bounds__(kSolveThreads) solve_systems(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ double panel[];  // [row, kStride]
  __shared__ double inverses[kPanel];
  const DecomposeAttentionArguments& a = launch.a;
  const int n = a.coefficients();
  const int rows = n + a.group();
  const int head = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  double* system = launch.memory.systems + int64_t{head} * rows * n;
  find_middles(launch, head);
  const double ridge = a.ridge * a.ridge / 4 * block_trace(system, n);
  for (int first = 0; first < n; first += kPanel) {
    const int size = min(kPanel, n - first);
    load_panel(system, n, rows, first, ridge, panel);
    __syncthreads();
    if (thread < kWarp) factor_square(panel, size, inverses);
    __syncthreads();
    solve_rows(panel, size, rows - first, inverses);
    __syncthreads();
    for (int i = thread; i < (rows - first) * kPanel; i += kSolveThreads) {
      const int column = i % kPanel;
      if (column < size) system[int64_t{first + i / kPanel} * n + first + column] = panel[i / kPanel * kStride + column];
    }
    __syncthreads();
  }
  solve_backwards(system, n, a.group(), panel);

  const double* middle = launch.memory.middles + int64_t{head} * n;
  for (int g = thread / kWarp; g < a.group(); g += kSolveWarps) {
    const int64_t query_head = int64_t{head} * a.group() + g;
    double2 offset = {0, 0};
    for (int k = lane; k < n; k += kWarp) {
      const double value = system[int64_t{n + g} * n + k];
      launch.memory.solutions[query_head * n + k] = value;
      (k < 2 * a.pairs ? offset.x : offset.y) += middle[k] * value;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      offset.x += __shfl_xor_sync(kAllLanes, offset.x, distance);
      offset.y += __shfl_xor_sync(kAllLanes, offset.y, distance);
    }
    if (lane == 0) launch.memory.offsets[query_head] = offset;
  }
}

}  // namespace

Status solve_least_squares(const Launch& launch) {
  if (launch.samples == 0) return Status::success();
  const DecomposeAttentionArguments& a = launch.a;
  const size_t bytes = static_cast<size_t>(a.coefficients() + a.group()) * kStride * sizeof(double);
  const cudaError_t error = cudaFuncSetAttribute(solve_systems, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return cuda_status(error);
  solve_systems<<<launch.kv_heads(), kSolveThreads, bytes, launch.stream>>>(launch);
  return launch_status();
}

}  // namespace decomposition
}  // namespace kv
