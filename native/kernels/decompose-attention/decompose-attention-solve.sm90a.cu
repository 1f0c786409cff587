// The least squares (line 13), in f64, of up to 256 columns and 8 right sides: a cluster of thread blocks keeps each matrix in
// registers.
#include "kernels/decompose-attention/decompose-attention.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/cluster.cuda.h"
#include "ptx/mbarrier.cuda.h"
#include "ptx/mma-f64.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace decomposition {
namespace sm90a {
namespace {

constexpr int kSide = 16;  // rows and columns of a tile
constexpr int kMostTiles = 16;  // in a column of the matrix; the right sides are one more, below
constexpr unsigned kCluster = 4;
constexpr int kSolveThreads = 256;
constexpr int kSolveWarps = kSolveThreads / kWarp;
// One warp of a cluster factors the tiles on the diagonal. The one that shares its scheduler keeps the right sides.
constexpr int kKeeper = 4;
constexpr int kWorkers = kCluster * kSolveWarps - 2;
// Tiles below the diagonal, of right sides, and on the diagonal but for the first two.
constexpr int kOwnTiles = (kMostTiles * (kMostTiles + 1) / 2 + kMostTiles - 2) / kWorkers;
static_assert(kOwnTiles * kWorkers == kMostTiles * (kMostTiles + 1) / 2 + kMostTiles - 2);
constexpr int kStride = kSide + 2;  // of rows in shared memory, where a tile is not as lanes hold it
constexpr unsigned kAllLanes = 0xffffffffu;

// What a lane holds of a tile, as mma writes it: of rows lane / 4 and lane / 4 + 8 the columns lane % 4 * 2 + {0, 1}, and the same
// columns + 8. The products here go through columns in an order in which these are operands, too, of rows and of the columns
// of the transpose.
struct Tile {
  double values[2][4];

  __device__ void load(const double2 (&from)[4][kWarp]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const double2 pair = from[i][threadIdx.x % kWarp];
      values[i / 2][i % 2 * 2] = pair.x;
      values[i / 2][i % 2 * 2 + 1] = pair.y;
    }
  }
  // Rows from 8 on are zeros.
  __device__ void load(const double2 (&from)[2][kWarp]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const double2 pair = from[i][threadIdx.x % kWarp];
      values[i][0] = pair.x;
      values[i][1] = pair.y;
      values[i][2] = values[i][3] = 0;
    }
  }
  // What a product with the tile itself takes of it, not with its transpose.
  __device__ Tile turned() const {
    Tile result;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int from = (lane % 4 * 2 + i) * 4 + lane / 8;
          const double even = __shfl_sync(kAllLanes, values[j][2 * half], from);
          const double odd = __shfl_sync(kAllLanes, values[j][2 * half + 1], from);
          result.values[half][2 * j + i] = lane / 4 % 2 == 0 ? even : odd;
        }
      }
    }
    return result;
  }
  __device__ double2 pair(int i) const { return {values[i / 2][i % 2 * 2], values[i / 2][i % 2 * 2 + 1]}; }
};
using Stored = double2[4][kWarp];
constexpr uint32_t kTileBytes = sizeof(Stored);
// Right sides are at most the upper rows of a tile.
constexpr int kMostSides = kSide / 2;
using StoredSides = double2[2][kWarp];
constexpr uint32_t kSidesBytes = sizeof(StoredSides);

// sums += rows * columns; columns(half, j) is what mma takes of 8 columns and of half the depth.
template <class Columns>
__device__ void multiply(Tile& sums, const Tile& rows, Columns&& columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const double (&own)[4] = rows.values[half];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const double2 column = columns(half, j);
      ptx::mma_m16n8k8(sums.values[j], {own[0], own[2], own[1], own[3]}, {column.x, column.y});
    }
  }
}
__device__ void multiply_transpose(Tile& sums, const Tile& rows, const Tile& columns) {
  multiply(sums, rows, [&](int half, int j) { return columns.pair(2 * half + j); });
}

// What each column of tiles waits for, once. Those marked with 0 count in the first thread block only.
struct Barriers {
  uint64_t factored[kMostTiles];   // the inverse of its diagonal's tile
  uint64_t panel[kMostTiles];      // its tiles below
  uint64_t handed[kMostTiles];     // 0: its diagonal's tile, without what all panels but the last one before it explain
  uint64_t done[kMostTiles];       // 0: all that reads its panel
  uint64_t solved[kMostTiles];     // what is solved of it
  uint64_t explained[kMostTiles];  // 0: what that explains of the right sides of the columns before
  uint64_t added[kMostTiles];      // 0: that this has been taken out of them
};

struct Shared {
  Stored panel[kMostTiles + 1];
  Stored inverse;  // of the factor's diagonal tile, transposed and negated, as a product with it takes it
  // Of the first thread block.
  Stored handed[2];
  Stored turned[kMostTiles];  // the inverses
  StoredSides sides[kMostTiles];
  StoredSides odd[kMostTiles];
  double rows[kSide * kStride];
  Barriers barriers;

  // On the way back, when the panels have done their work: what is solved, and what a column of it explains, whose neighbour's is
  // still read.
  __device__ StoredSides& solved(int column) { return reinterpret_cast<StoredSides*>(panel)[column]; }
  __device__ StoredSides& explained(int column, int of) {
    return column % 2 == 0 ? reinterpret_cast<StoredSides*>(panel)[kMostTiles + of] : odd[of];
  }
};

// Sends what a lane has of a tile to the thread blocks first .. end - 1.
template <class To>
__device__ void send(To& to, uint64_t& barrier, const Tile& tile, unsigned first, unsigned end) {
  constexpr int kPairs = sizeof(To) / sizeof(double2[kWarp]);
#pragma unroll
  for (unsigned rank = first; rank < end; ++rank) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      ptx::cluster_send(&to[i][threadIdx.x % kWarp], &barrier, rank, tile.pair(kPairs == 4 ? i : 2 * i));
    }
  }
}

// What a lane holds of the negated system, whose rows past the matrix are right sides.
__device__ Tile negated(const double* system, int n, int rows, int row, int column) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Tile tile{};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at_row = row + lane / 4 + i % 2 * 8;
    const int at_column = column + lane % 4 * 2 + i / 2 * 8;
    if (at_row >= rows || at_column >= n) continue;
    const double* from = system + int64_t{at_row} * n + at_column;
    if (at_column <= at_row) tile.values[i / 2][i % 2 * 2] = -from[0];
    if (at_column + 1 <= at_row && at_column + 1 < n) tile.values[i / 2][i % 2 * 2 + 1] = -from[1];
  }
  return tile;
}

// Factors a negated tile of the diagonal, in one warp, and inverts the factor: 16 lanes have a row each, the others those of the
// unit matrix below, which become the inverse's transpose. Columns from `size` on are those of the unit matrix. Roots are taken
// last: what comes next waits for the inverse of a pivot only. The inverse before this one and its panel are read until `done`.
__device__ void invert(const Tile& negated, double ridge, int size, double* rows, Stored& inverse, uint64_t& factored, uint64_t* done,
                       Stored& turned) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = lane % kSide;
  const bool unit = lane >= kSide;
  __syncwarp();  // what was there has been read
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<double2*>(rows + (lane / 4 + i % 2 * 8) * kStride + lane % 4 * 2 + i / 2 * 8) = negated.pair(i);
  }
  __syncwarp();
  double values[kSide];
#pragma unroll
  for (int k = 0; k < kSide; k += 2) {
    const double2 pair = *reinterpret_cast<const double2*>(rows + row * kStride + k);
    values[k] = unit ? 0 : -pair.x;
    values[k + 1] = unit ? 0 : -pair.y;
  }
#pragma unroll
  for (int k = 0; k < kSide; ++k) {
    if (k == row) values[k] = unit || k >= size ? 1 : values[k] + ridge;
  }
  double pivot = __shfl_sync(kAllLanes, values[0], 0);
  double own_pivot = pivot;
#pragma unroll
  for (int column = 0; column < kSide; ++column) {
    const double reciprocal = ptx::reciprocal(pivot);
    if (row == column) own_pivot = pivot;
    if (column + 1 < kSide) {
      const double below = __shfl_sync(kAllLanes, values[column], column + 1);
      pivot = fma(-(below * below), reciprocal, __shfl_sync(kAllLanes, values[column + 1], column + 1));
    }
#pragma unroll
    for (int k = column + 1; k < kSide; ++k) {
      values[k] = fma(-(values[column] * __shfl_sync(kAllLanes, values[column], k)), reciprocal, values[k]);
    }
  }
  const double root = rsqrt(own_pivot);
#pragma unroll
  for (int k = 0; k < kSide; ++k) values[k] *= __shfl_sync(kAllLanes, root, k);
  __syncwarp();  // two lanes have read each row
  if (unit) {
    double* to = rows + (row / 8 * 2 * kWarp + row % 8 / 2) * 2 + row % 2;
#pragma unroll
    for (int k = 0; k < kSide; ++k) to[(k / 8 * kWarp + k % 8 * 4) * 2] = -values[k];
  }
  __syncwarp();
  Tile sent;
  sent.load(*reinterpret_cast<const Stored*>(rows));
  if (done != nullptr) ptx::mbarrier_wait(done, 0);
  send(inverse, factored, sent, 0, kCluster);
  if (unit) {
#pragma unroll
    for (int k = 0; k < kSide; k += 2) turned[k / 8 * 2 + row / 8][row % 8 * 4 + k % 8 / 2] = {values[k], values[k + 1]};
  }
}

// Where a tile of a warp's is: below the diagonal or of right sides, column by column, or of the diagonal until it is handed over.
struct Place {
  int value;

  __device__ Place(int index, int tiles) : value(kNone) {
    for (int column = 0; column < tiles; ++column) {
      const int first = column < 2 ? column + 1 : column;
      const int count = tiles - first + 1;
      if (index < count) {
        value = (first + index) * kColumns + column;
        return;
      }
      index -= count;
    }
  }
  __device__ int row() const { return value / kColumns; }
  __device__ int column() const { return value % kColumns; }

 private:
  static constexpr int kColumns = 256;
  static constexpr int kNone = kColumns - 1;  // a column that never comes
};

// The warp that factors the tiles of the diagonal, and solves backwards. `tile` and `second` are the first two of them.
__device__ void lead(Shared& shared, Tile tile, const Tile& second, int n, int tiles, double ridge) {
  Barriers& barriers = shared.barriers;
  for (int k = 0; k < tiles; ++k) {
    if (k == 1) tile = second;
    if (k >= 2) {
      ptx::mbarrier_wait(&barriers.handed[k], 0);
      tile.load(shared.handed[k % 2]);
    }
    if (k > 0) {
      ptx::mbarrier_wait(&barriers.panel[k - 1], 0);
      Tile last;
      last.load(shared.panel[k]);
      multiply_transpose(tile, last, last);
    }
    invert(tile, ridge, n - k * kSide, shared.rows, shared.inverse, barriers.factored[k], k > 0 ? &barriers.done[k - 1] : nullptr,
           shared.turned[k]);
  }
  ptx::mbarrier_wait(&barriers.done[tiles - 1], 0);
  __syncwarp();
  for (int k = tiles - 1; k >= 0; --k) {
    if (k + 2 < tiles) ptx::mbarrier_wait(&barriers.added[k + 2], 0);
    Tile side;
    side.load(shared.sides[k]);
    if (k + 1 < tiles) {
      ptx::mbarrier_wait(&barriers.explained[k + 1], 0);
      Tile explained;
      explained.load(shared.explained(k + 1, k));
#pragma unroll
      for (int i = 0; i < 4; ++i) side.values[i / 2][i % 2] -= explained.values[i / 2][i % 2];
    }
    Tile solved{};
    multiply(solved, side, [&](int half, int j) { return shared.turned[k][2 * half + j][threadIdx.x % kWarp]; });
    send(shared.solved(k), barriers.solved[k], solved, 0, kCluster);
  }
}

// The warp that keeps the right sides: takes them out of the panels, and on the way back what is explained of all but the next one.
__device__ void keep(Shared& shared, int tiles) {
  Barriers& barriers = shared.barriers;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int k = 0; k < tiles; ++k) {
    ptx::mbarrier_wait(&barriers.panel[k], 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) shared.sides[k][i][lane] = shared.panel[tiles][2 * i][lane];
    ptx::mbarrier_arrive(&barriers.done[k]);
  }
  for (int k = tiles - 1; k >= 2; --k) {
    ptx::mbarrier_wait(&barriers.explained[k], 0);
    for (int j = k - 2; j >= 0; --j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const double2 pair = shared.explained(k, j)[i][lane];
        double2& side = shared.sides[j][i][lane];
        side = {side.x - pair.x, side.y - pair.y};
      }
    }
    ptx::mbarrier_arrive(&barriers.added[k]);
  }
}

// Factors the matrix of a kv head (Cholesky) and solves. The right sides are further rows of the matrix, so the factorisation turns
// them into their forward solutions. A tile stays in the registers of its warp until its column comes; then it is multiplied by
// the inverse of the diagonal's tile, and all take what it explains out of their tiles, while one warp factors the next tile
// of the diagonal. Then back: what is solved explains a part of the right sides of all columns before. No other thread block is to
// share a multiprocessor: it would hold up the warp for which all wait.
__global__ void __launch_bounds__(kSolveThreads, 1) solve_systems(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Barriers& barriers = shared.barriers;
  const DecomposeAttentionArguments& a = launch.a;
  const int n = a.coefficients();
  const int rows = n + a.group();
  const int tiles = (n + kSide - 1) / kSide;
  const int head = static_cast<int>(blockIdx.x / kCluster);
  const int rank = static_cast<int>(blockIdx.x % kCluster);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  const int lane = thread % kWarp;
  const bool leads = rank == 0 && warp == 0;
  const bool keeps = rank == 0 && warp == kKeeper;
  const int worker = rank == 0 ? warp - (warp < kKeeper ? 1 : 2) : rank * kSolveWarps + warp - 2;
  const double* system = launch.memory.systems + int64_t{head} * rows * n;
  if (warp == 0) {
    const auto all = [&](auto&& body) {
      body(barriers.factored, kTileBytes);
      body(barriers.panel, static_cast<uint32_t>(tiles - lane) * kTileBytes);
      body(barriers.handed, kTileBytes);
      body(barriers.solved, kSidesBytes);
      body(barriers.explained, static_cast<uint32_t>(lane) * kSidesBytes);
    };
    if (lane < tiles) {
      all([&](uint64_t* of, uint32_t) { ptx::mbarrier_init(of + lane, 1); });
      ptx::mbarrier_init(barriers.done + lane, kWorkers + kWarp);
      ptx::mbarrier_init(barriers.added + lane, kWarp);
    }
    __syncwarp();
    if (lane < tiles) all([&](uint64_t* of, uint32_t bytes) { ptx::mbarrier_arrive_expect_bytes(of + lane, bytes); });
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();  // all of them run, and their barriers are there
  ptx::wait_for_previous_kernel();
  if (*launch.memory.fits == 0) return;

  if (leads) {
    double ridge = 0;
    for (int i = lane; i < n; i += kWarp) ridge += system[int64_t{i} * n + i];
    for (int distance = kWarp / 2; distance > 0; distance /= 2) ridge += __shfl_xor_sync(kAllLanes, ridge, distance);
    const Tile first = negated(system, n, n, 0, 0);
    const Tile second = negated(system, n, n, kSide, kSide);
    lead(shared, first, second, n, tiles, ridge * (a.ridge * a.ridge / 4));
  } else if (keeps) {
    keep(shared, tiles);
  } else {
    // Right sides begin a tile of their own.
    const Place at[kOwnTiles] = {{worker, tiles},
                                 {worker + kWorkers, tiles},
                                 {worker + 2 * kWorkers, tiles},
                                 {worker + 3 * kWorkers, tiles},
                                 {worker + 4 * kWorkers, tiles}};
    Tile own[kOwnTiles];
#pragma unroll
    for (int i = 0; i < kOwnTiles; ++i) {
      const bool side = at[i].row() == tiles;
      own[i] = negated(system, n, side ? rows : n, side ? n : at[i].row() * kSide, at[i].column() * kSide);
    }
    for (int k = 0; k < tiles; ++k) {
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
        if (at[i].column() != k || at[i].row() <= k) continue;
        ptx::mbarrier_wait(&barriers.factored[k], 0);
        Tile solved{};
        multiply(solved, own[i], [&](int half, int j) { return shared.inverse[2 * half + j][lane]; });
        send(shared.panel[at[i].row()], barriers.panel[k], solved, 0, kCluster);
        own[i] = solved;
      }
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
        if (at[i].row() <= k || at[i].column() <= k || (at[i].row() == k + 1 && at[i].column() == k + 1)) continue;
        ptx::mbarrier_wait(&barriers.panel[k], 0);
        Tile of_row;
        Tile of_column;
        of_row.load(shared.panel[at[i].row()]);
        of_column.load(shared.panel[at[i].column()]);
        multiply_transpose(own[i], of_row, of_column);
        if (at[i].row() == k + 2 && at[i].column() == k + 2) send(shared.handed[k % 2], barriers.handed[k + 2], own[i], 0, 1);
      }
      __syncwarp();
      if (lane == 0) ptx::cluster_arrive(&barriers.done[k], 0);
    }
    for (int k = tiles - 1; k > 0; --k) {
#pragma unroll
      for (int i = 0; i < kOwnTiles; ++i) {
        if (at[i].row() != k || at[i].column() >= k) continue;
        const Tile turned = own[i].turned();
        ptx::mbarrier_wait(&barriers.solved[k], 0);
        Tile solved;
        Tile explained{};
        solved.load(shared.solved(k));
        multiply_transpose(explained, solved, turned);
        send(shared.explained(k, at[i].column()), barriers.explained[k], explained, 0, 1);
      }
    }
  }

  for (int k = 0; k < tiles; ++k) ptx::mbarrier_wait(&barriers.solved[k], 0);
  ptx::let_next_kernel_start();
  const double* middle = launch.memory.middles + int64_t{head} * n;
  for (int g = rank * kSolveWarps + warp; g < a.group(); g += kCluster * kSolveWarps) {
    const int64_t query_head = int64_t{head} * a.group() + g;
    double2 offset = {0, 0};
    for (int i = lane; i < n; i += kWarp) {
      const double2 pair = shared.solved(i / kSide)[i % kSide / 8][g * 4 + i % 8 / 2];
      const double value = i % 2 == 0 ? pair.x : pair.y;
      launch.memory.solutions[query_head * n + i] = value;
      (i < 2 * a.pairs ? offset.x : offset.y) += middle[i] * value;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      offset.x += __shfl_xor_sync(kAllLanes, offset.x, distance);
      offset.y += __shfl_xor_sync(kAllLanes, offset.y, distance);
    }
    if (lane == 0) launch.memory.offsets[query_head] = offset;
  }
}

}  // namespace

bool fits_cluster(const DecomposeAttentionArguments& a) { return a.coefficients() <= kMostTiles * kSide && a.group() <= kMostSides; }

Status solve_least_squares(const Launch& launch) {
  constexpr size_t kBytes = sizeof(Shared);
  const cudaError_t error = cudaFuncSetAttribute(solve_systems, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes));
  if (error != cudaSuccess) return cuda_status(error);
  return launch_overlapped_clusters(solve_systems, launch.kv_heads() * kCluster, kSolveThreads, kCluster, kBytes, launch.stream, launch);
}

}  // namespace sm90a
}  // namespace decomposition
}  // namespace kv
