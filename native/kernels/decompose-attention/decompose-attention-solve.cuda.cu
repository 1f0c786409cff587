// The least squares (line 13), in f64.
#include "kernels/decompose-attention/decompose-attention.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/mma-f64.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kPanel = 16;  // columns that are factored together
constexpr int kSolveThreads = 512;
constexpr int kSolveWarps = kSolveThreads / kWarp;
constexpr int kStride = kPanel + 2;  // of rows of panels; even, so that two numbers are read at once
constexpr int kSidesAtOnce = 4;
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

// What the other rows of a panel are solved with.
struct Square {
  double columns[kPanel][kPanel];  // [column, row]: the factor's
  double inverses[kPanel];         // of its diagonal
};

// The factor in global memory, as mma reads it: 16 rows by 8 columns at a time, of which a lane has four numbers that
// follow each other. They are both a row's and, of the same rows, a column's operand.
struct Factor {
  double* values;  // [tile of 16 rows, 8 columns, lane, 4]
  int chunks;      // of 8 columns

  __device__ Factor(const Launch& launch, int head)
      : values(launch.memory.factors + head * launch.factor_values()), chunks(2 * ((launch.a.coefficients() + 15) / 16)) {}
  __device__ double* fragment(int row, int column) const { return values + (int64_t{row} / 16 * chunks + column / 8) * 4 * kWarp; }
  // The numbers of 16 rows from `row` on in one column; the first two are those of rows 0 and 8, the next ones of 1 and 9.
  __device__ void load_column(int row, int column, double (&numbers)[kPanel]) const {
    const double* from = fragment(row, column) + column % 4 * 4 + column % 8 / 4 * 2;
#pragma unroll
    for (int i = 0; i < kPanel / 2; ++i) {
      const double2 pair = *reinterpret_cast<const double2*>(from + i * 16);
      numbers[i] = pair.x;
      numbers[i + 8] = pair.y;
    }
  }
  // Takes 16 rows of a panel over from shared memory.
  __device__ void store(const double* panel, int first, int rows) const {
    for (int i = static_cast<int>(threadIdx.x); i < (rows - first + 15) / 16 * 2 * kWarp; i += kSolveThreads) {
      const int top = i / (2 * kWarp) * 16;
      const int column = i / kWarp % 2 * 8 + i % 4;
      const auto at = [&](int row, int k) {
        const int own = top + i % kWarp / 4 + row;
        return own < rows - first ? panel[own * kStride + column + k] : 0;
      };
      auto* to = reinterpret_cast<double2*>(fragment(first + top, first + column) + i % kWarp * 4);
      to[0] = {at(0, 0), at(8, 0)};
      to[1] = {at(0, 4), at(8, 4)};
    }
  }
};

// Calls body(row, column, index of the sum, part of it) for what a lane holds of a tile that begins at row `top`.
template <class Body>
__device__ void each_sum(int top, Body&& body) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int part = 0; part < 4; ++part) body(top + part / 2 * 8 + lane / 4, 8 * j + lane % 4 * 2 + part % 2, j, part);
  }
}

// Writes the panel of columns that begins at `first`, without what the columns before `explained` explain of it: [row,
// kStride]. Warps from `warp` on do it, each 16 rows at a time.
__device__ void begin_panel(const double* system, const Factor& factor, int n, int rows, int first, int explained, double ridge,
                            double* panel, int warp) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int size = min(kPanel, n - first);
  const int own = static_cast<int>(threadIdx.x) / kWarp - warp;
  for (int top = own * 16; top < rows - first; top += (kSolveWarps - warp) * 16) {
    const auto* row = reinterpret_cast<const double2*>(factor.fragment(first + top, 0) + lane * 4);
    const auto* column = reinterpret_cast<const double2*>(factor.fragment(first, 0) + lane * 4);
    double values[2][4];
    each_sum(top, [&](int row, int column, int j, int part) {
      const bool real = first + row < rows && column < size && column <= row;
      values[j][part] = real ? system[int64_t{first + row} * n + first + column] : 0;
    });
    double sums[2][4] = {};
#pragma unroll 4
    for (int k = 0; k < explained; k += 8) {
      const double2 rows_here[2] = {row[k * kWarp / 4], row[k * kWarp / 4 + 1]};
      const double2 columns_here[2] = {column[k * kWarp / 4], column[k * kWarp / 4 + 1]};
      const double numbers[4] = {rows_here[0].x, rows_here[0].y, rows_here[1].x, rows_here[1].y};
      ptx::mma_m16n8k8(sums[0], numbers, {columns_here[0].x, columns_here[1].x});
      ptx::mma_m16n8k8(sums[1], numbers, {columns_here[0].y, columns_here[1].y});
    }
    each_sum(top, [&](int row, int column, int j, int part) {
      if (first + row >= rows) return;
      panel[row * kStride + column] = values[j][part] - sums[j][part] + (row == column ? ridge : 0);
    });
  }
}

// Takes what a solved panel explains out of the next one, which has kPanel rows less.
__device__ void finish_panel(const double* solved, int rows, double* next) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int top = static_cast<int>(threadIdx.x) / kWarp * 16; top < rows; top += kSolveWarps * 16) {
    const auto row_at = [&](int row) { return solved + (kPanel + min(row, rows - 1)) * kStride + lane % 4; };
    double sums[2][4] = {};
#pragma unroll
    for (int k = 0; k < kPanel; k += 8) {
      double numbers[4];
      double columns[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        numbers[i] = row_at(top + lane / 4 + i % 2 * 8)[k + i / 2 * 4];
        columns[i] = row_at(lane / 4 + i % 2 * 8)[k + i / 2 * 4];
      }
      for (int j = 0; j < 2; ++j) ptx::mma_m16n8k8(sums[j], numbers, {columns[j], columns[j + 2]});
    }
    each_sum(top, [&](int row, int column, int j, int part) {
      if (row < rows) next[row * kStride + column] -= sums[j][part];
    });
  }
}

// Factors the square on top of a panel, in one warp. Each lane has one row, two lanes the same. Columns past `size` are
// those of the unit matrix. Roots are taken last: what comes next waits for the inverse of a pivot only.
__device__ void factor_square(double* panel, int size, Square& square) {
  const int row = static_cast<int>(threadIdx.x) % kPanel;
  double values[kPanel];
#pragma unroll
  for (int k = 0; k < kPanel; ++k) values[k] = row < size && k < size ? panel[row * kStride + k] : row == k;
  double pivot = __shfl_sync(kAllLanes, values[0], 0);
  double own_pivot = pivot;
#pragma unroll
  for (int column = 0; column < kPanel; ++column) {
    const double inverse = ptx::reciprocal(pivot);
    if (row == column) own_pivot = pivot;
    if (column + 1 < kPanel) {
      const double below = __shfl_sync(kAllLanes, values[column], column + 1);
      pivot = fma(-(below * below), inverse, __shfl_sync(kAllLanes, values[column + 1], column + 1));
    }
#pragma unroll
    for (int k = column + 1; k < kPanel; ++k) {
      values[k] = fma(-(values[column] * __shfl_sync(kAllLanes, values[column], k)), inverse, values[k]);
    }
  }
  const double root = rsqrt(own_pivot);
#pragma unroll
  for (int k = 0; k < kPanel; ++k) values[k] *= __shfl_sync(kAllLanes, root, k);
  __syncwarp();  // two lanes have read each row
  if (threadIdx.x >= kPanel) return;
  square.inverses[row] = root;
#pragma unroll
  for (int k = 0; k < kPanel; ++k) {
    square.columns[k][row] = values[k];
    if (row < size && k < size) panel[row * kStride + k] = values[k];
  }
}

// Solves the other rows of a panel for the square. One thread has one row.
__device__ void solve_rows(double* panel, int size, int rows, const Square& square) {
  for (int row = size + static_cast<int>(threadIdx.x); row < rows; row += kSolveThreads) {
    auto* own = reinterpret_cast<double2*>(panel + row * kStride);
    double values[kPanel];
#pragma unroll
    for (int k = 0; k < kPanel; k += 2) {
      const double2 pair = own[k / 2];
      values[k] = k < size ? pair.x : 0;
      values[k + 1] = k + 1 < size ? pair.y : 0;
    }
#pragma unroll
    for (int column = 0; column < kPanel; ++column) {
      values[column] *= square.inverses[column];
#pragma unroll
      for (int k = (column + 1) / 2 * 2; k < kPanel; k += 2) {
        const double2 factors = *reinterpret_cast<const double2*>(&square.columns[column][k]);
        if (k > column) values[k] -= values[column] * factors.x;
        values[k + 1] -= values[column] * factors.y;
      }
    }
#pragma unroll
    for (int k = 0; k < kPanel; k += 2) own[k / 2] = {values[k], values[k + 1]};
  }
}

// Solves backwards, a square at a time. A warp solves the square of one right side; then each thread takes what is solved
// out of one of the equations before. `solved`: [right side, kPanel].
__device__ void solve_backwards(double* system, const Factor& factor, int n, int group, double* solved) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  for (int first = (n - 1) / kPanel * kPanel; first >= 0; first -= kPanel) {
    const int size = min(kPanel, n - first);
    double below[kPanel] = {};
    if (thread < first) {
      factor.load_column(first, thread, below);
      ptx::prefetch_line(factor.fragment(first - kPanel, 0) + thread * (128 / sizeof(double)));  // what comes next
    }
    if (thread / kWarp < group) {
      const int own = min(lane, size - 1);
      double column[kPanel];
      factor.load_column(first, first + own, column);
      double diagonal = 1;
#pragma unroll
      for (int k = 0; k < kPanel; ++k) diagonal = k == own ? column[k] : diagonal;
      const double inverse = 1 / diagonal;
#pragma unroll
      for (int k = 0; k < kPanel; ++k) column[k] *= inverse;
      for (int g = thread / kWarp; g < group; g += kSolveWarps) {
        double value = system[int64_t{n + g} * n + first + own] * inverse;
#pragma unroll
        for (int k = kPanel - 1; k > 0; --k) {
          const double known = __shfl_sync(kAllLanes, value, k);
          if (k < size && own < k) value -= column[k] * known;
        }
        if (lane < kPanel) solved[g * kPanel + lane] = lane < size ? value : 0;
        if (lane < size) system[int64_t{n + g} * n + first + lane] = value;
      }
    }
    __syncthreads();
    for (int g = 0; g < group && thread < first; g += kSidesAtOnce) {
      double values[kSidesAtOnce];
#pragma unroll
      for (int i = 0; i < kSidesAtOnce; ++i) values[i] = g + i < group ? system[int64_t{n + g + i} * n + thread] : 0;
#pragma unroll
      for (int i = 0; i < kSidesAtOnce; ++i) {
        if (g + i >= group) break;
#pragma unroll
        for (int k = 0; k < kPanel; ++k) values[i] -= below[k] * solved[(g + i) * kPanel + k];
        system[int64_t{n + g + i} * n + thread] = values[i];
      }
    }
    __syncthreads();
  }
}

// One thread block for each kv head factors the matrix (Cholesky, in panels of columns). The right sides are further
// rows of the matrix, so the factorisation turns them into their forward solutions. While one warp factors the square of
// a panel, the others begin the next panel.
__global__ void __launch_bounds__(kSolveThreads) solve_systems(const __grid_constant__ Launch launch) {
  ptx::wait_for_previous_kernel();
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) double panels[];  // [2, row, kStride]
  __shared__ __align__(16) Square square;
  const DecomposeAttentionArguments& a = launch.a;
  const int n = a.coefficients();
  const int rows = n + a.group();
  const int head = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  double* system = launch.memory.systems + int64_t{head} * rows * n;
  const Factor factor(launch, head);
  const double ridge = a.ridge * a.ridge / 4 * block_trace(system, n);
  double* panel = panels;
  double* next = panels + rows * kStride;
  begin_panel(system, factor, n, rows, 0, 0, ridge, panel, 0);
  for (int first = 0; first < n; first += kPanel) {
    const int size = min(kPanel, n - first);
    __syncthreads();
    if (thread < kWarp) {
      factor_square(panel, size, square);
    } else if (first + kPanel < n) {
      begin_panel(system, factor, n, rows, first + kPanel, first, ridge, next, 1);
    }
    __syncthreads();
    solve_rows(panel, size, rows - first, square);
    __syncthreads();
    if (first + kPanel < n) finish_panel(panel, rows - first - kPanel, next);
    factor.store(panel, first, rows);
    for (int i = thread; i < a.group() * kPanel; i += kSolveThreads) {
      const int row = n + i / kPanel;
      if (i % kPanel < size) system[int64_t{row} * n + first + i % kPanel] = panel[(row - first) * kStride + i % kPanel];
    }
    double* const done = panel;
    panel = next;
    next = done;
  }
  __syncthreads();
  solve_backwards(system, factor, n, a.group(), panels);

  ptx::let_next_kernel_start();
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

size_t panels_bytes(const DecomposeAttentionArguments& a) {
  return 2 * static_cast<size_t>(a.coefficients() + a.group()) * kStride * sizeof(double);
}

}  // namespace

size_t solver_bytes(const DecomposeAttentionArguments& a) {
  return panels_bytes(a) + sizeof(Square) + kSolveThreads * sizeof(double);
}

Status solve_least_squares(const Launch& launch) {
  if (launch.samples == 0) return Status::success();
  if (launch.hopper && sm90a::fits_cluster(launch.a)) return sm90a::solve_least_squares(launch);
  const size_t bytes = panels_bytes(launch.a);
  const cudaError_t error = cudaFuncSetAttribute(solve_systems, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return cuda_status(error);
  return launch_overlapped(solve_systems, launch.kv_heads(), kSolveThreads, bytes, launch.stream, launch);
}

}  // namespace decomposition
}  // namespace kv
