// The mean and the covariance of the keys in the interior of the first row of each tile of 128 rows, for heads of 64 or 128
// dims in a 16-bit dtype: for the tiles of a segment, one behind the other, so that memory does not grow with the prompt.
//   1. The products of the keys that come between two tiles are added up on tensor cores.
//   2. Running sums over the tiles give means and covariances. Means are taken out before a covariance is rounded to 16
//      bits, so that nothing is lost to them.
#include "kernels/decompose-attention/decompose-attention-row-parts.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/mma.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kChunk = 64;       // keys whose products are added up at a time
constexpr int kStages = 3;       // of which so many are under way
constexpr int kTilesAtOnce = 8;  // whose sums a thread loads together

// Whether there are sums of earlier tiles or calls.
__device__ bool is_carried(const Launch& launch) { return launch.first_tile > 0 || launch.a.seen_tokens > 0; }

// What comes between two tiles: the products of its keys, and their sums. A warp has 16 rows of the matrix.
template <class T, int kDims>
__global__ void __launch_bounds__(kThreads, 2) add_products(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) char shared[];
  constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
  constexpr int kStrips = kDims / kSquareDims;
  constexpr int kColumns = kDims * kStrips / kWarps;
  constexpr int kTiles = kColumns / 8;
  auto* chunks = reinterpret_cast<T*>(shared);  // [stage, key, kStride]
  const Interior interior(launch.a);
  const int head = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int top = warp % kStrips * kSquareDims;
  const int left = warp / kStrips * kColumns;
  const StoredKeys<T> keys(launch.a, head);
  const int run = launch.first_tile + static_cast<int>(blockIdx.x);
  const int32_t end = launch.run_end(interior, run);
  const int32_t start = launch.run_first(interior, run);
  float values[kTiles][4] = {};
  float sums[4] = {};  // of each row, in every column
  const auto load = [&](int32_t first) {
    T* to = chunks + (first - start) / kChunk % kStages * kChunk * kStride<kDims>;
    if (first < end) copy_keys<T, kDims>(keys, first, min(end - first, kChunk), kChunk, to);
    ptx::async_copy_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) load(start + i * kChunk);
  for (int32_t first = start; first < end; first += kChunk) {
    ptx::async_copy_wait<kStages - 2>();
    __syncthreads();
    load(first + (kStages - 1) * kChunk);
    const T* chunk = chunks + (first - start) / kChunk % kStages * kChunk * kStride<kDims>;
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t rows[4];
      ptx::load_matrices_transposed(rows, chunk + (k + lane % 8 + lane / 16 * 8) * kStride<kDims> + top + lane / 8 % 2 * 8);
      ptx::mma_m16n8k16<T>(sums, rows, kOnes, kOnes);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        if (left + 8 * tile < top) continue;  // below the diagonal
        uint32_t columns[4];
        ptx::load_matrices_transposed(columns, chunk + (k + lane % 16) * kStride<kDims> + left + 8 * tile + lane / 16 * 8);
        ptx::mma_m16n8k16<T>(values[tile], rows, columns[0], columns[1]);
        ptx::mma_m16n8k16<T>(values[tile + 1], rows, columns[2], columns[3]);
      }
    }
  }
  const int64_t slot = int64_t{head} * (launch.kept_tiles() + 1) + blockIdx.x;
  float* to = launch.memory.moments + slot * kDims * kDims;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int column = left + 8 * tile + 2 * (lane % 4);
    if (column / kSquareDims < top / kSquareDims) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(to + (top + lane / 4 + 8 * half) * kDims + column) =
          make_float2(values[tile][2 * half], values[tile][2 * half + 1]);
    }
  }
  if (lane % 4 != 0 || left != 0) return;
  launch.memory.tile_sums[slot * kDims + top + lane / 4] = sums[0];
  launch.memory.tile_sums[slot * kDims + top + lane / 4 + 8] = sums[2];
}

// The means, and for each tile a power of two that makes its largest variance about 1. A thread has a dim.
template <class T, int kDims>
__global__ void __launch_bounds__(kDims) find_means(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  __shared__ uint32_t largest[kTilesAtOnce][kDims / kWarp];
  const Interior interior(launch.a);
  const int head = static_cast<int>(blockIdx.x);
  const int dim = static_cast<int>(threadIdx.x);
  const int tiles = launch.segment_tiles();
  const int first_row = interior.first_row + launch.first_tile * kMmaTokens;
  const StoredKeys<T> keys(launch.a, head);
  // The keys before the segment, of which the last ones are not in the sums of blocks.
  const int32_t last = interior.end(first_row);
  float walked = 0;
#pragma unroll 16
  for (int32_t key = max(last / kTurnTokens * kTurnTokens, launch.first_key(interior)); key < last; ++key) {
    walked += to_float(keys.at(key)[dim]);
  }
  double sum = launch.key_sums_before(head, last / kTurnTokens)[dim] + static_cast<double>(walked);
  double square = is_carried(launch) ? launch.layout().moments(launch.a.state, head)[dim * kDims + dim] : 0;
  const int64_t first_slot = int64_t{head} * (launch.kept_tiles() + 1);
  const float* sums = launch.memory.tile_sums + first_slot * kDims + dim;
  const float* squares = launch.memory.moments + first_slot * kDims * kDims + dim * kDims + dim;
  for (int first = 0; first < tiles; first += kTilesAtOnce) {
    float own_sums[kTilesAtOnce];
    float own_squares[kTilesAtOnce];
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      const int64_t tile = first + i;
      own_sums[i] = tile > 0 && tile < tiles ? sums[tile * kDims] : 0;  // the first tile's are in the sum
      own_squares[i] = tile < tiles ? squares[tile * kDims * kDims] : 0;
    }
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      sum += static_cast<double>(own_sums[i]);
      square += static_cast<double>(own_squares[i]);
      const int32_t count = interior.count(first_row + (first + i) * kMmaTokens);
      const float inverse = count > 0 ? 1.0f / static_cast<float>(count) : 0;
      const float mean = static_cast<float>(sum) * inverse;
      const float variance = static_cast<float>(square) * inverse - mean * mean;
      const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(fmaxf(variance, 0)));
      if (dim % kWarp == 0) largest[i][dim / kWarp] = most;
      if (first + i < tiles) launch.memory.tile_means[(int64_t{head} * launch.kept_tiles() + first + i) * kDims + dim] = mean;
    }
    __syncthreads();
    if (dim < kTilesAtOnce && first + dim < tiles) {
      uint32_t most = 0;
      for (const uint32_t of_warp : largest[dim]) most = max(most, of_warp);
      // Bits of the exponent: f32 holds 2^-exponent of whatever is not subnormal.
      const uint32_t exponent = max(most >> 23, 1u);
      launch.memory.tile_scales[int64_t{head} * launch.kept_tiles() + first + dim] = exponent > 253 ? 0 : __uint_as_float(exponent << 23);
    }
    __syncthreads();
  }
}

// The covariances, each divided by its tile's power of two. Of the symmetric matrix, squares below the diagonal are left
// out, and those above it are doubled. A thread block has a square, a thread two neighbouring numbers of it in every tile.
constexpr int kSquareThreads = kSquareDims * kSquareDims / 2;
template <class T, int kDims>
__global__ void __launch_bounds__(kSquareThreads) make_covariances(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  const Interior interior(launch.a);
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  int of_row = 0;
  int of_column = static_cast<int>(blockIdx.x);
  for (; of_column >= kDims / kSquareDims - of_row; ++of_row) of_column -= kDims / kSquareDims - of_row;
  of_column += of_row;
  const int row = of_row * kSquareDims + thread / (kSquareDims / 2);
  const int column = of_column * kSquareDims + thread % (kSquareDims / 2) * 2;
  const float weight = of_row == of_column ? 1 : 2;
  const int tiles = launch.segment_tiles();
  const int first_row = interior.first_row + launch.first_tile * kMmaTokens;
  const int64_t first_tile = int64_t{head} * launch.kept_tiles();
  constexpr int64_t kSize = int64_t{kDims} * kDims;
  const float* products = launch.memory.moments + (first_tile + head) * kSize + row * kDims + column;
  const float* means = launch.memory.tile_means + first_tile * kDims;
  T* to = reinterpret_cast<T*>(launch.memory.covariances) + first_tile * kParts<T> * kSize + row * kDims + column;
  double* state = launch.layout().moments(launch.a.state, head);
  double* kept = state + row * kDims + column;
  double2 sum = {0, 0};
  if (is_carried(launch)) sum = {kept[0], kept[1]};
  for (int first = 0; first <= tiles; first += kTilesAtOnce) {
    float2 own[kTilesAtOnce];
    float of_rows[kTilesAtOnce];
    float2 of_columns[kTilesAtOnce];
    float scales[kTilesAtOnce];
    // What comes behind the last tile is only in the last segment.
    const int slots = launch.first_tile + tiles == launch.mma_tiles() ? tiles + 1 : tiles;
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      const int64_t tile = first + i;
      own[i] = tile < slots ? *reinterpret_cast<const float2*>(products + tile * kSize) : make_float2(0, 0);
      if (tile >= tiles) continue;
      of_rows[i] = means[tile * kDims + row];
      of_columns[i] = *reinterpret_cast<const float2*>(means + tile * kDims + column);
      scales[i] = launch.memory.tile_scales[first_tile + tile];
    }
#pragma unroll
    for (int i = 0; i < kTilesAtOnce; ++i) {
      const int64_t tile = first + i;
      sum = {sum.x + static_cast<double>(own[i].x), sum.y + static_cast<double>(own[i].y)};
      if (tile >= tiles) continue;
      const int32_t count = interior.count(first_row + static_cast<int>(tile) * kMmaTokens);
      const float inverse = count > 0 ? 1.0f / static_cast<float>(count) : 0;
      const float factor = scales[i] > 0 ? weight / scales[i] : 0;
      float2 rest = {(static_cast<float>(sum.x) * inverse - of_rows[i] * of_columns[i].x) * factor,
                     (static_cast<float>(sum.y) * inverse - of_rows[i] * of_columns[i].y) * factor};
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) {
        const uint32_t packed = ptx::pack<T>(rest.x, rest.y);
        *reinterpret_cast<uint32_t*>(to + (tile * kParts<T> + part) * kSize) = packed;
        rest = {rest.x - unpacked<T>(packed).x, rest.y - unpacked<T>(packed).y};
      }
    }
  }
  kept[0] = sum.x;
  kept[1] = sum.y;
  // The state has all squares, whoever reads it next.
  if (of_row == of_column) return;
  state[column * kDims + row] = sum.x;
  state[(column + 1) * kDims + row] = sum.y;
}

template <class T, int kDims>
Status launch_covariances(const Launch& launch) {
  constexpr int kBytes = kStages * kChunk * kStride<kDims> * static_cast<int>(sizeof(T));
  const cudaError_t error = cudaFuncSetAttribute(add_products<T, kDims>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return cuda_status(error);
  const int tiles = launch.segment_tiles();
  const bool last = launch.first_tile + tiles == launch.mma_tiles();
  const dim3 slots(static_cast<unsigned>(last ? tiles + 1 : tiles), launch.kv_heads());
  add_products<T, kDims><<<slots, kThreads, kBytes, launch.stream>>>(launch);
  find_means<T, kDims><<<launch.kv_heads(), kDims, 0, launch.stream>>>(launch);
  constexpr unsigned kStrips = kDims / kSquareDims;
  make_covariances<T, kDims><<<dim3(kStrips * (kStrips + 1) / 2, launch.kv_heads()), kSquareThreads, 0, launch.stream>>>(launch);
  return launch_status();
}

}  // namespace

Status make_covariances(const Launch& launch) {
  return with_sizes(launch.a, [&](auto element, auto dims) { return launch_covariances<decltype(element), dims.value>(launch); });
}

}  // namespace decomposition
}  // namespace kv
