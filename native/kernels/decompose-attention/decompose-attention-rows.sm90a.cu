// Each row's mean, variance and Λ-shape on Hopper: as decompose-attention-rows-mma.cuda.cu, with products of warpgroups.
// A warp has 16 rows of one query head; the four warps of a group have rows near each other, of as many heads as there are.
// Queries are in registers, all that they are multiplied with is in shared memory.
#include "kernels/decompose-attention/decompose-attention-row-parts.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/tensor-copy.cuda.h"
#include "ptx/wgmma.cuda.h"

namespace kv {
namespace decomposition {
namespace sm90a {
namespace {

constexpr int kGroupWarps = 4;    // of a warpgroup
constexpr int kGroups = 2;        // of a thread block; others of another thread block go on while one waits
constexpr int kRowThreads = kGroups * kGroupWarps * kWarp;
constexpr int kStripRows = 16;    // rows of a warp
constexpr int kBlockKeys = 64;    // keys that a warpgroup is multiplied with at a time
constexpr int kQuadraticRows = 32;  // the same of rows of a covariance
constexpr int kPanelDims = 64;    // of a row of 128 bytes
constexpr int kRowBytes = 128;
constexpr int kAlignment = 1024;  // of a swizzled matrix

// A matrix in shared memory, in panels of kPanelDims columns: [panel, row, 128 bytes], swizzled for wgmma.
struct Matrix {
  char* values;
  int rows;

  __device__ char* piece(int row, int column) const {
    const int chunk = column % kPanelDims / 8 ^ row % 8;
    return values + (column / kPanelDims * rows + row) * kRowBytes + chunk * 16;
  }
  // 16 columns from 16 * k on, of rows from `row` on, which is a multiple of 8.
  __device__ uint64_t operand(int row, int k) const {
    constexpr int kSteps = kPanelDims / 16;
    return ptx::wgmma_advance(ptx::wgmma_operand(values), (k / kSteps * rows + row) * kRowBytes + k % kSteps * 32);
  }
};

__host__ __device__ inline int band_rows(const DecomposeAttentionArguments& a) {
  return (kMmaTokens + a.diagonal_tokens + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
}
// Means of the keys before a tile, then sinks.
__host__ __device__ inline int few_rows(const DecomposeAttentionArguments& a) { return kMeanRows + sink_rows(a); }

// Begins to copy keys; rows past `count` are zeros.
template <class T, int kDims>
__device__ void copy_keys(const StoredKeys<T>& keys, int32_t first, int count, int rows, const Matrix& to, int to_row) {
  constexpr int kPieces = kDims / 8;
  const int column = static_cast<int>(threadIdx.x) % kPieces * 8;
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x) / kPieces; row < rows; row += kRowThreads / kPieces) {
    const bool real = row < count;
    ptx::async_copy_16(to.piece(to_row + row, column), (real ? keys.at(first + row) : keys.pool) + column, real);
  }
}

// Adds the products of queries with rows of a matrix, from column 16 * kFirst on.
template <class T, int kDims, int kFirst, int kRows>
__device__ void multiply(float (&products)[kRows / 2], const uint32_t (&queries)[kDims / 16][4], const Matrix& matrix, int row) {
#pragma unroll
  for (int k = kFirst; k < kDims / 16; ++k) {
    ptx::WgmmaRegistersByRow<T, kRows>::issue(products, queries[k], matrix.operand(row, k));
  }
}

// Calls issue(), which begins products, and waits for them.
template <int kCount, class Issue>
__device__ void finish(float (&products)[kCount], Issue&& issue) {
  ptx::pin_registers(products);
  ptx::wgmma_fence();
  issue();
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(products);
}

template <int kCount>
__device__ void start_products(const PartOfRow (&rows)[2], float (&products)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) products[i] = -rows[i % 4 / 2].centre;
}

// Adds q C q to the squares of a warp's rows, kQuadraticRows rows of C at a time.
template <class T, int kDims, int kFirst = 0>
__device__ void add_quadratic(const uint32_t (&queries)[kDims / 16][4], const Matrix& covariance, float weight, PartOfRow (&rows)[2]) {
  if constexpr (kFirst < kDims) {
    float products[kQuadraticRows / 2] = {};
    finish(products, [&] {
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) {
        multiply<T, kDims, kFirst / 16, kQuadraticRows>(products, queries, covariance, part * kDims + kFirst);
      }
    });
#pragma unroll
    for (int i = 0; i < kQuadraticRows / 8 * 2; ++i) {
      const int half = i % 2;
      const float* of_row = products + i / 2 * 4 + 2 * half;
      const float2 values = unpacked<T>(queries[kFirst / 16 + i / 4][half + i / 2 % 2 * 2]);
      rows[half].square += weight * (of_row[0] * values.x + of_row[1] * values.y);
    }
    add_quadratic<T, kDims, kFirst + kQuadraticRows>(queries, covariance, weight, rows);
  }
}

template <class T, int kDims>
__global__ void __launch_bounds__(kRowThreads, kParts<T> == 1 ? 2 : 1) add_rows(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ char unaligned[];
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int head = static_cast<int>(blockIdx.y);
  const int first = (launch.first_tile + static_cast<int>(blockIdx.x)) * kMmaTokens;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const int warp = thread / kWarp;
  const int tokens = min(kMmaTokens, a.rows - first);
  const int32_t first_row = interior.first_row + first;
  const int32_t first_new = interior.end(first_row);
  const int sinks = min(interior.sinks, a.tokens);
  char* shared = unaligned + (kAlignment - ptx::shared_address(unaligned) % kAlignment) % kAlignment;
  const Matrix covariance{shared, kParts<T> * kDims};
  const Matrix band{covariance.values + covariance.rows * kDims * static_cast<int>(sizeof(T)), band_rows(a)};
  const Matrix few{band.values + band.rows * kDims * static_cast<int>(sizeof(T)), few_rows(a)};
  const StoredKeys<T> keys(a, head);
  const int64_t tile = int64_t{head} * launch.kept_tiles() + blockIdx.x;
  const T* stored = reinterpret_cast<const T*>(launch.memory.covariances) + tile * kParts<T> * kDims * kDims;
  for (int i = thread; i < kParts<T> * kDims * kDims / 8; i += kRowThreads) {
    const int row = i / (kDims / 8);
    const int column = i % (kDims / 8) * 8;
    ptx::async_copy_16(covariance.piece(row, column), stored + int64_t{i} * 8, column / kSquareDims >= row % kDims / kSquareDims);
  }
  copy_keys<T, kDims>(keys, 0, sinks, sink_rows(a), few, kMeanRows);
  copy_keys<T, kDims>(keys, first_new, first_row + tokens - first_new, band_rows(a), band, 0);
  ptx::async_copy_commit();
  for (int i = thread; i < tokens * a.group(); i += kRowThreads) {
    ptx::prefetch(query_at<T>(a, first + i / a.group(), head * a.group() + i % a.group()), kDims * sizeof(T));
  }
  // The mean as a sum of numbers of 16 bits, each what the one before leaves.
  for (int dim = thread; dim < kDims; dim += kRowThreads) {
    float rest = launch.memory.tile_means[tile * kDims + dim];
    for (int row = 0; row < kMeanRows; ++row) {
      const T part = from_float<T>(row < kMeanParts ? rest : 0.0f);
      reinterpret_cast<T*>(few.piece(row, dim))[dim % 8] = part;
      rest -= to_float(part);
    }
  }
  const float of_quadratic = launch.memory.tile_scales[tile] * static_cast<float>(interior.count(first_row));
  ptx::async_copy_wait<0>();
  ptx::fence_async_proxy();
  __syncthreads();

  const float to_powers = a.scale * kLog2E;
  const int strips = (tokens + kStripRows - 1) / kStripRows * a.group();
  // Later rows have more keys; they come first.
#pragma unroll 1
  for (int unit = (strips - 1) / kGroupWarps - warp / kGroupWarps; unit >= 0; unit -= kGroups) {
    const int strip = min(unit * kGroupWarps + warp % kGroupWarps, strips - 1);
    const bool real = unit * kGroupWarps + warp % kGroupWarps < strips;
    const int own = strip / a.group() * kStripRows;
    const int query_head = head * a.group() + strip % a.group();
    const int last_own = min(unit * kGroupWarps + kGroupWarps - 1, strips - 1) / a.group() * kStripRows;
    uint32_t queries[kDims / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = min(own + 8 * half + lane / 4, tokens - 1);
      const T* query = query_at<T>(a, first + token, query_head) + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kDims / 8; ++i) {
        queries[i / 2][half + i % 2 * 2] = *reinterpret_cast<const uint32_t*>(query + 8 * i);
      }
    }
    PartOfRow rows[2];
    {
      float products[kChunkKeys / 2] = {};
      finish(products, [&] { multiply<T, kDims, 0, kChunkKeys>(products, queries, few, 0); });
#pragma unroll
      for (int half = 0; half < 2; ++half) rows[half].centre = quad_sum(products[2 * half] + products[2 * half + 1]);
    }
    add_quadratic<T, kDims>(queries, covariance, of_quadratic, rows);

    const int32_t position = first_row + own + lane / 4;  // of the first of the thread's two rows
    const int32_t lowest = first_row + own;
    const int32_t highest = first_row + min(own + kStripRows, tokens) - 1;
    const int32_t highest_of_unit = first_row + min(last_own + kStripRows, tokens) - 1;
    const bool wide = interior.count(lowest) == 0;
#pragma unroll 1
    for (int n = 0; n < sinks; n += kChunkKeys) {
      float products[kChunkKeys / 2];
      start_products(rows, products);
      finish(products, [&] { multiply<T, kDims, 0, kChunkKeys>(products, queries, few, kMeanRows + n); });
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = position + 8 * half;
        const int seen = min(row + 1, sinks) - n - 2 * (lane % 4);
        add_chunk<Keys::mixed>(rows[half], products, half, to_powers, {interior.count(row) == 0 ? seen : 0, 0, seen});
      }
    }
#pragma unroll 1
    for (int32_t block = first_new; block <= highest_of_unit; block += kBlockKeys) {
      float products[kBlockKeys / 2];
      start_products(rows, products);
      finish(products, [&] { multiply<T, kDims, 0, kBlockKeys>(products, queries, band, block - first_new); });
#pragma unroll
      for (int chunk = 0; chunk < kBlockKeys / kChunkKeys; ++chunk) {
        const int32_t from = block + chunk * kChunkKeys;
        const int32_t last = from + kChunkKeys - 1;
        const float* of_chunk = products + chunk * kChunkKeys / 2;
        if (from > highest) continue;
        if (!wide && last <= lowest - interior.diagonal) {
#pragma unroll
          for (int half = 0; half < 2; ++half) add_chunk<Keys::interior>(rows[half], of_chunk, half, to_powers);
        } else if (!wide && from > lowest + kStripRows - 1 - interior.diagonal && last <= lowest) {
#pragma unroll
          for (int half = 0; half < 2; ++half) add_chunk<Keys::shape>(rows[half], of_chunk, half, to_powers);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int32_t row = position + 8 * half;
            const int seen = row + 1 - from - 2 * (lane % 4);
            const bool only_shape = interior.count(row) == 0;
            const int shape = only_shape ? 0 : seen - interior.diagonal;
            add_chunk<Keys::mixed>(rows[half], of_chunk, half, to_powers, {only_shape ? seen : shape, shape, seen});
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = own + 8 * half + lane / 4;
      write_row(launch, rows[half], query_head, first + token, real && token < tokens);
    }
  }
}

template <class T, int kDims>
Status launch_rows(const Launch& launch) {
  const DecomposeAttentionArguments& a = launch.a;
  const size_t rows = static_cast<size_t>(kParts<T> * kDims + band_rows(a) + few_rows(a));
  const size_t bytes = rows * kDims * sizeof(T) + kAlignment;
  const auto kernel = add_rows<T, kDims>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return cuda_status(error);
  const dim3 tiles(static_cast<unsigned>(launch.segment_tiles()), launch.kv_heads());
  kernel<<<tiles, kRowThreads, bytes, launch.stream>>>(launch);
  return launch_status();
}

}  // namespace

Status add_rows(const Launch& launch) {
  return with_sizes(launch.a, [&](auto element, auto dims) { return launch_rows<decltype(element), dims.value>(launch); });
}

}  // namespace sm90a
}  // namespace decomposition
}  // namespace kv
