// Each row's mean, variance and Λ-shape (lines 3 to 8) on tensor cores, for heads of 64 or 128 dims in a 16-bit dtype.
//   1. The products of the keys of each run of rows are added up; running sums over the runs follow.
//   2. For each tile of 128 rows the covariance of the keys in the interior of its first row is rounded to 16 bits.
//      Means are taken out before, so that nothing is lost to them.
//   3. For each row q: q C q, and the products with the keys that are new to its tile, and with the sinks.
#include "kernels/decompose-attention/decompose-attention.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/mma.cuda.h"

namespace kv {
namespace decomposition {
namespace {

constexpr int kUnitRows = 16;   // rows of two query heads, which a warp computes at a time
constexpr int kUnitHeads = 2;   // they share what is read of the keys
constexpr int kRowThreads = 8 * kWarp;  // two thread blocks of them have room for all numbers in registers
constexpr int kUnits = kMmaTokens / kUnitRows;
constexpr int kChunkKeys = 16;  // keys that a unit is multiplied with at a time
constexpr int kRowKeys = 64;    // keys whose products are added up at a time
constexpr int kStages = 4;      // of which so many are under way
constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -3e38f;  // finite, so that infinities are never subtracted

constexpr int kMeanParts = 3;   // f32 has no more bits than so many numbers of 16 bits
constexpr int kMeanRows = 16;

// bf16 has so few bits that a covariance takes two numbers.
template <class T>
constexpr int kParts = std::is_same_v<T, __half> ? 1 : 2;

template <int kDims>
constexpr int kStride = kDims + 8;  // of rows in shared memory, so that eight rows lie in other banks

template <class T>
__device__ float2 unpacked(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  else return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

// Copies keys to shared memory; rows past `count` are zeros. A warp copies some rows at a time.
template <class T, int kDims>
__device__ void copy_keys(const StoredKeys<T>& keys, int32_t first, int count, int rows, T* to) {
  constexpr int kPieces = kDims / 8;
  const int thread = static_cast<int>(threadIdx.x);
  const int piece = thread % kPieces * 8;
#pragma unroll 4
  for (int row = thread / kPieces; row < rows; row += static_cast<int>(blockDim.x) / kPieces) {
    const bool real = row < count;
    const T* from = real ? keys.at(first + row) : keys.pool;
    ptx::async_copy_16(to + row * kStride<kDims> + piece, from + piece, real);
  }
}

// A warp's part of a matrix of kDims x kDims: 16 rows, and some columns.
template <int kDims>
struct Strip {
  static constexpr int kStrips = kDims / 16;
  static constexpr int kColumns = kDims * kStrips / kWarps;
  static constexpr int kTiles = kColumns / 8;
  float values[kTiles][4] = {};
  float sums[4] = {};  // of each row, in every column
  int top = static_cast<int>(threadIdx.x) / kWarp % kStrips * 16;
  int left = static_cast<int>(threadIdx.x) / kWarp / kStrips * kColumns;
  int lane = static_cast<int>(threadIdx.x) % kWarp;

  // Calls body(row, column, two neighbouring values).
  template <class Body>
  __device__ void each(Body&& body) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        body(top + lane / 4 + 8 * half, left + 8 * tile + 2 * (lane % 4), values[tile] + 2 * half);
      }
    }
  }

  // Adds the products of kRowKeys keys in shared memory, and, if kSums, the keys themselves.
  template <bool kSums, class T>
  __device__ void add(const T* keys) {
    constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
#pragma unroll
    for (int k = 0; k < kRowKeys; k += 16) {
      uint32_t rows[4];
      ptx::load_matrices_transposed(rows, keys + (k + lane % 8 + lane / 16 * 8) * kStride<kDims> + top + lane / 8 % 2 * 8);
      if constexpr (kSums) ptx::mma_m16n8k16<T>(sums, rows, kOnes, kOnes);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        uint32_t columns[4];
        ptx::load_matrices_transposed(columns, keys + (k + lane % 16) * kStride<kDims> + left + 8 * tile + lane / 16 * 8);
        ptx::mma_m16n8k16<T>(values[tile], rows, columns[0], columns[1]);
        ptx::mma_m16n8k16<T>(values[tile + 1], rows, columns[2], columns[3]);
      }
    }
  }
};

template <class T, int kDims>
__global__ void __launch_bounds__(kThreads, 2) add_run(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) char shared[];
  auto* chunks = reinterpret_cast<T*>(shared);  // [stage, key, kStride]
  constexpr int kChunk = kRowKeys * kStride<kDims>;
  const Interior interior(launch.a);
  const int run = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const StoredKeys<T> keys(launch.a, head);
  const int32_t end = launch.run_end(interior, run);
  const int32_t start = launch.run_first(interior, run);
  Strip<kDims> strip;
  const auto load = [&](int32_t first) {
    T* to = chunks + (first - start) / kRowKeys % kStages * kChunk;
    if (first < end) copy_keys<T, kDims>(keys, first, min(end - first, kRowKeys), kRowKeys, to);
    ptx::async_copy_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) load(start + i * kRowKeys);
  for (int32_t first = start; first < end; first += kRowKeys) {
    ptx::async_copy_wait<kStages - 2>();
    __syncthreads();
    load(first + (kStages - 1) * kRowKeys);
    strip.template add<false>(chunks + (first - start) / kRowKeys % kStages * kChunk);
  }
  float* to = launch.memory.moments + (int64_t{head} * (launch.runs + 1) + run) * kDims * kDims;
  strip.each([&](int row, int column, const float* pair) {
    *reinterpret_cast<float2*>(to + row * kDims + column) = make_float2(pair[0], pair[1]);
  });
}

// Writes the covariance of the keys in the interior of each tile's first row, times a power of two that makes its
// largest number about 1, and their mean. Of the symmetric matrix, squares of kChunkKeys x kChunkKeys below the diagonal
// are left out, and those above it are doubled.
template <class T, int kDims>
__global__ void __launch_bounds__(kThreads, 2) make_covariances(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) char shared[];
  auto* chunks = reinterpret_cast<T*>(shared);  // [2, key, kStride]
  __shared__ float means[kDims];
  __shared__ float largest[kWarps];
  const Interior interior(launch.a);
  const int run = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const StoredKeys<T> keys(launch.a, head);
  const int end = min(launch.a.rows, (run + 1) * kRunTokens);
  const auto behind = [&](int first) { return interior.end(interior.first_row + first); };
  // The keys that the tile at `first` adds for the next one.
  const auto new_keys = [&](int first) { return first + kMmaTokens < end ? behind(first + kMmaTokens) - behind(first) : 0; };
  const auto load = [&](int first) {
    T* to = chunks + first / kMmaTokens % 2 * kMmaTokens * kStride<kDims>;
    if (first < end && new_keys(first) > 0) copy_keys<T, kDims>(keys, behind(first), new_keys(first), kMmaTokens, to);
    ptx::async_copy_commit();
  };
  load(run * kRunTokens);
  Strip<kDims> strip;
  const float* moments = launch.memory.moments + (int64_t{head} * (launch.runs + 1) + run) * kDims * kDims;
  strip.each([&](int row, int column, float* pair) {
    if (column / kChunkKeys < row / kChunkKeys) return;
    const float2 values = *reinterpret_cast<const float2*>(moments + row * kDims + column);
    pair[0] = values.x;
    pair[1] = values.y;
  });
  if (thread < kDims) {
    // The keys before the run, of which the last ones are not in the sums of blocks.
    const int32_t last = behind(run * kRunTokens);
    float walked = 0;
#pragma unroll 16
    for (int32_t key = max(last / kTurnTokens * kTurnTokens, launch.first_key(interior)); key < last; ++key) {
      walked += to_float(keys.at(key)[thread]);
    }
    means[thread] = static_cast<float>(launch.key_sums_before(head, last / kTurnTokens)[thread] + static_cast<double>(walked));
  }
  __syncthreads();
  float sums[2] = {means[strip.top + lane / 4], means[strip.top + lane / 4 + 8]};  // of a lane's two rows
  __syncthreads();

  for (int first = run * kRunTokens; first < end; first += kMmaTokens) {
    const int32_t count = interior.count(interior.first_row + first);
    const int64_t tile = int64_t{head} * launch.mma_tiles() + first / kMmaTokens;
    const float inverse = count > 0 ? 1.0f / static_cast<float>(count) : 0;
    const float own[2] = {sums[0] * inverse, sums[1] * inverse};
    float most = 0;
    strip.each([&](int row, int column, float* pair) {
      const float mean = row < strip.top + 8 ? own[0] : own[1];
      for (int i = 0; i < 2; ++i) {
        if (row == column + i) most = fmaxf(most, pair[i] * inverse - mean * mean);
      }
    });
    for (int distance = kWarp / 2; distance > 0; distance /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
    if (lane == 0) largest[thread / kWarp] = most;
    if (lane % 4 == 0 && strip.left == 0) {
      means[strip.top + lane / 4] = own[0];
      means[strip.top + lane / 4 + 8] = own[1];
    }
    __syncthreads();
    load(first + kMmaTokens);
    for (const float of_warp : largest) most = fmaxf(most, of_warp);
    // Bits of the exponent: f32 holds 2^-exponent of whatever is not subnormal.
    const int exponent = max(__float_as_int(most) >> 23, 1) - 127;
    const float factor = exponent > 126 ? 0 : __int_as_float((127 - exponent) << 23);
    T* to = reinterpret_cast<T*>(launch.memory.covariances) + tile * kParts<T> * kDims * kDims;
    strip.each([&](int row, int column, const float* pair) {
      if (column / kChunkKeys < row / kChunkKeys) return;
      const float mean = row < strip.top + 8 ? own[0] : own[1];
      const float weight = column / kChunkKeys == row / kChunkKeys ? factor : 2 * factor;
      float2 rest = {(pair[0] * inverse - mean * means[column]) * weight, (pair[1] * inverse - mean * means[column + 1]) * weight};
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) {
        const uint32_t packed = ptx::pack<T>(rest.x, rest.y);
        *reinterpret_cast<uint32_t*>(to + (part * kDims + row) * kDims + column) = packed;
        rest = {rest.x - unpacked<T>(packed).x, rest.y - unpacked<T>(packed).y};
      }
    });
    if (thread < kDims) launch.memory.tile_means[tile * kDims + thread] = means[thread];
    if (thread == 0) launch.memory.tile_scales[tile] = factor > 0 ? 1.0f / factor : 0;

    ptx::async_copy_wait<1>();
    __syncthreads();
    if (new_keys(first) == 0) continue;
    const T* chunk = chunks + first / kMmaTokens % 2 * kMmaTokens * kStride<kDims>;
    for (float& sum : strip.sums) sum = 0;
    strip.template add<true>(chunk);
    if (new_keys(first) > kRowKeys) strip.template add<true>(chunk + kRowKeys * kStride<kDims>);
    sums[0] += strip.sums[0];
    sums[1] += strip.sums[2];
  }
}

// What a thread knows of a row, in logits before their scale and without the row's centre. Four threads have a row.
struct PartOfRow {
  float centre = 0;  // the logit of the mean of the keys before the tile
  float sum = 0;
  float square = 0;
  float peak = kLowest;  // of sinks and diagonal, in powers of two
  float total = 0;
};

__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Adds the products of a unit's rows with 8 * kTiles rows of a matrix in shared memory, from column kFirst on.
template <class T, int kDims, int kTiles, int kFirst>
__device__ void multiply(const uint32_t (&queries)[kUnitHeads][kDims / 16][4], const T* rows,
                         float (&products)[kUnitHeads][kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int k = kFirst / 16; k < kDims / 16; ++k) {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t columns[4];
      ptx::load_matrices(columns, rows + (8 * tile + lane % 8 + lane / 16 * 8) * kStride<kDims> + 16 * k + lane / 8 % 2 * 8);
#pragma unroll
      for (int m = 0; m < kUnitHeads; ++m) {
        ptx::mma_m16n8k16<T>(products[m][tile], queries[m][k], columns[0], columns[1]);
        ptx::mma_m16n8k16<T>(products[m][tile + 1], queries[m][k], columns[2], columns[3]);
      }
    }
  }
}

// Adds q C q of a unit's rows to their squares, a chunk of C's rows at a time.
template <class T, int kDims, int kFirst = 0>
__device__ void add_quadratic(const uint32_t (&queries)[kUnitHeads][kDims / 16][4], const T* covariance, float weight,
                              PartOfRow (&rows)[kUnitHeads][2]) {
  if constexpr (kFirst < kDims) {
    float products[kUnitHeads][kChunkKeys / 8][4] = {};
#pragma unroll
    for (int part = 0; part < kParts<T>; ++part) {
      multiply<T, kDims, kChunkKeys / 8, kFirst>(queries, covariance + (part * kDims + kFirst) * kStride<kDims>, products);
    }
#pragma unroll
    for (int i = 0; i < kUnitHeads * kChunkKeys / 8 * 2; ++i) {
      const int m = i / (kChunkKeys / 8 * 2);
      const int j = i / 2 % (kChunkKeys / 8);
      const int half = i % 2;
      const float2 values = unpacked<T>(queries[m][kFirst / 16 + j / 2][half + j % 2 * 2]);
      rows[m][half].square += weight * (products[m][j][2 * half] * values.x + products[m][j][2 * half + 1] * values.y);
    }
    add_quadratic<T, kDims, kFirst + kChunkKeys>(queries, covariance, weight, rows);
  }
}

// Rows of shared memory: sinks, then the keys that are new to the tile.
__host__ __device__ inline int sink_rows(const DecomposeAttentionArguments& a) {
  return (a.sink_tokens + kChunkKeys - 1) / kChunkKeys * kChunkKeys;
}
__host__ __device__ inline int band_rows(const DecomposeAttentionArguments& a) {
  return (kMmaTokens + a.diagonal_tokens + kChunkKeys - 1) / kChunkKeys * kChunkKeys;
}

// Which keys of a chunk a row has where: those before column `interior` count for its mean and variance, those from
// column `shape` on for its Λ-shape, none from column `seen` on.
struct Columns {
  int interior;
  int shape;
  int seen;
};

// Adds a chunk's products to a row. kInterior and kShape say that all of its keys count there and only there.
enum class Keys { interior, shape, mixed };
template <Keys kKeys, int kTiles>
__device__ void add_chunk(PartOfRow& row, const float (&products)[kTiles][4], int half, float to_powers, Columns columns = {}) {
  if constexpr (kKeys != Keys::shape) {
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) {
      const float logit = products[j / 2][2 * half + j % 2];
      if (kKeys == Keys::mixed && j / 2 * 8 + j % 2 >= columns.interior) continue;
      row.sum += logit;
      row.square += logit * logit;
    }
  }
  if constexpr (kKeys != Keys::interior) {
    float powers[2 * kTiles];
    float most = row.peak;
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) {
      const int column = j / 2 * 8 + j % 2;
      powers[j] = products[j / 2][2 * half + j % 2] * to_powers;
      if (kKeys == Keys::mixed && (column < columns.shape || column >= columns.seen)) powers[j] = -INFINITY;
      most = fmaxf(most, powers[j]);  // not of NaN, which shows in the total
    }
    row.total *= ptx::exp2_approximate(row.peak - most);
    row.peak = most;
#pragma unroll
    for (int j = 0; j < 2 * kTiles; ++j) row.total += ptx::exp2_approximate(powers[j] - most);
  }
}

template <int kTiles>
__device__ void start_products(const PartOfRow (&rows)[kUnitHeads][2], float (&products)[kUnitHeads][kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kUnitHeads * kTiles * 4; ++i) {
    const int m = i / (kTiles * 4);
    products[m][i / 4 % kTiles][i % 4] = -rows[m][i % 4 / 2].centre;
  }
}

template <class T, int kDims>
__global__ void __launch_bounds__(kRowThreads, 2) add_rows(const __grid_constant__ Launch launch) {
  if (*launch.memory.fits == 0) return;
  extern __shared__ __align__(16) char shared[];
  const DecomposeAttentionArguments& a = launch.a;
  const Interior interior(a);
  const int head = static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.x) * kMmaTokens;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const int tokens = min(kMmaTokens, a.rows - first);
  const int32_t first_row = interior.first_row + first;
  const int32_t first_new = interior.end(first_row);
  const int sinks = min(interior.sinks, a.tokens);
  T* covariance = reinterpret_cast<T*>(shared);
  T* means = covariance + kParts<T> * kDims * kStride<kDims>;
  T* of_sinks = means + kMeanRows * kStride<kDims>;
  T* band = of_sinks + sink_rows(a) * kStride<kDims>;
  const StoredKeys<T> keys(a, head);
  const int64_t tile = int64_t{head} * launch.mma_tiles() + blockIdx.x;
  const T* stored = reinterpret_cast<const T*>(launch.memory.covariances) + tile * kParts<T> * kDims * kDims;
  for (int i = thread; i < kParts<T> * kDims * kDims / 8; i += kRowThreads) {
    const int row = i / (kDims / 8);
    const int column = i % (kDims / 8) * 8;
    if (column / kChunkKeys < row % kDims / kChunkKeys) continue;
    ptx::async_copy_16(covariance + row * kStride<kDims> + column, stored + int64_t{i} * 8, true);
  }
  copy_keys<T, kDims>(keys, 0, sinks, sink_rows(a), of_sinks);
  copy_keys<T, kDims>(keys, first_new, first_row + tokens - first_new, band_rows(a), band);
  ptx::async_copy_commit();
  // The mean as a sum of numbers of 16 bits, each what the one before leaves.
  for (int dim = thread; dim < kDims; dim += kRowThreads) {
    float rest = launch.memory.tile_means[tile * kDims + dim];
    for (int row = 0; row < kMeanRows; ++row) {
      const T part = from_float<T>(row < kMeanParts ? rest : 0.0f);
      means[row * kStride<kDims> + dim] = part;
      rest -= to_float(part);
    }
  }
  const float of_quadratic = launch.memory.tile_scales[tile] * static_cast<float>(interior.count(first_row));
  ptx::async_copy_wait<0>();
  __syncthreads();

  const float to_powers = a.scale * kLog2E;
  const int pairs = (a.group() + kUnitHeads - 1) / kUnitHeads;
  for (int unit = thread / kWarp; unit < pairs * kUnits; unit += kRowThreads / kWarp) {
    const int first_head = unit % pairs * kUnitHeads;
    // Later rows have more keys; they come first.
    const int own = (kUnits - 1 - unit / pairs) * kUnitRows;
    if (own >= tokens) continue;
    uint32_t queries[kUnitHeads][kDims / 16][4];
    PartOfRow rows[kUnitHeads][2];
#pragma unroll
    for (int m = 0; m < kUnitHeads; ++m) {
      const int query_head = head * a.group() + min(first_head + m, a.group() - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = min(own + 8 * half + lane / 4, tokens - 1);
        const T* query = query_at<T>(a, first + token, query_head) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < kDims / 8; ++i) {
          queries[m][i / 2][half + i % 2 * 2] = *reinterpret_cast<const uint32_t*>(query + 8 * i);
        }
      }
    }
    {
      float products[kUnitHeads][2][4] = {};
      multiply<T, kDims, 2, 0>(queries, means, products);
#pragma unroll
      for (int i = 0; i < 2 * kUnitHeads; ++i) {
        rows[i / 2][i % 2].centre = quad_sum(products[i / 2][0][i % 2 * 2] + products[i / 2][0][i % 2 * 2 + 1]);
      }
    }
    add_quadratic<T, kDims>(queries, covariance, of_quadratic, rows);

    const int32_t position = first_row + own + lane / 4;  // of the first of the thread's two rows of a head
    const int32_t lowest = first_row + own;
    const int32_t highest = first_row + min(own + kUnitRows, tokens) - 1;
    const bool wide = interior.count(lowest) == 0;
    for (int n = 0; n < sinks; n += kChunkKeys) {
      float products[kUnitHeads][kChunkKeys / 8][4];
      start_products(rows, products);
      multiply<T, kDims, kChunkKeys / 8, 0>(queries, of_sinks + n * kStride<kDims>, products);
#pragma unroll
      for (int i = 0; i < 2 * kUnitHeads; ++i) {
        const int32_t row = position + 8 * (i % 2);
        const int seen = min(row + 1, sinks) - n - 2 * (lane % 4);
        add_chunk<Keys::mixed>(rows[i / 2][i % 2], products[i / 2], i % 2, to_powers,
                               {interior.count(row) == 0 ? seen : 0, 0, seen});
      }
    }
    for (int32_t from = first_new; from <= highest; from += kChunkKeys) {
      float products[kUnitHeads][kChunkKeys / 8][4];
      start_products(rows, products);
      multiply<T, kDims, kChunkKeys / 8, 0>(queries, band + (from - first_new) * kStride<kDims>, products);
      const int32_t last = from + kChunkKeys - 1;
      if (!wide && last <= lowest - interior.diagonal) {
#pragma unroll
        for (int i = 0; i < 2 * kUnitHeads; ++i) {
          add_chunk<Keys::interior>(rows[i / 2][i % 2], products[i / 2], i % 2, to_powers);
        }
      } else if (!wide && from > lowest + kUnitRows - 1 - interior.diagonal && last <= lowest) {
#pragma unroll
        for (int i = 0; i < 2 * kUnitHeads; ++i) {
          add_chunk<Keys::shape>(rows[i / 2][i % 2], products[i / 2], i % 2, to_powers);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kUnitHeads; ++i) {
          const int32_t row = position + 8 * (i % 2);
          const int seen = row + 1 - from - 2 * (lane % 4);
          const bool only_shape = interior.count(row) == 0;
          const int shape = only_shape ? 0 : seen - interior.diagonal;
          add_chunk<Keys::mixed>(rows[i / 2][i % 2], products[i / 2], i % 2, to_powers,
                                 {only_shape ? seen : shape, shape, seen});
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kUnitHeads; ++i) {
      const PartOfRow& row = rows[i / 2][i % 2];
      float peak = row.peak;
      for (int distance = 1; distance < 4; distance *= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, distance));
      const float total = quad_sum(row.total * ptx::exp2_approximate(row.peak - peak));
      const float sum = quad_sum(row.sum);
      const float square = quad_sum(row.square);
      const int token = own + i % 2 * 8 + lane / 4;
      if (lane % 4 != 0 || token >= tokens || first_head + i / 2 >= a.group()) continue;
      const int64_t query_head = head * a.group() + first_head + i / 2;
      const int32_t row_position = first_row + token;
      const int32_t inside = interior.count(row_position);
      const float counted = static_cast<float>(inside == 0 ? row_position + 1 : inside);
      const float shift = sum / counted;
      const float variance = (square / counted - shift * shift) * a.scale * a.scale;
      const int64_t to = query_head * a.rows + first + token;
      launch.memory.variance[to] = variance > 0 || variance != variance ? variance : 0;
      launch.memory.log_shape[to] = (peak + log2f(total)) / kLog2E - shift * a.scale;
      if (row_position == a.tokens - 1) launch.memory.last_means[query_head] = (row.centre + shift) * a.scale;
    }
  }
}

template <class T, int kDims>
size_t shared_bytes(const DecomposeAttentionArguments& a) {
  return static_cast<size_t>(kParts<T> * kDims + kMeanRows + sink_rows(a) + band_rows(a)) * kStride<kDims> * sizeof(T);
}

template <class Body>
auto with_sizes(const DecomposeAttentionArguments& a, Body&& body) {
  using Half = __half;
  using Brain = __nv_bfloat16;
  constexpr std::integral_constant<int, 64> narrow{};
  constexpr std::integral_constant<int, 128> usual{};
  if (a.cache_dtype == DType::f16) return a.head_dim == 64 ? body(Half{}, narrow) : body(Half{}, usual);
  return a.head_dim == 64 ? body(Brain{}, narrow) : body(Brain{}, usual);
}

bool aligned(const void* pointer, int64_t first_stride, int64_t second_stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && first_stride % 8 == 0 && second_stride % 8 == 0;
}

}  // namespace

bool fits_tensor_cores(const DecomposeAttentionArguments& a) {
  const bool fits = a.cache_dtype != DType::f32 && a.cache_dtype == a.query_dtype && (a.head_dim == 64 || a.head_dim == 128) &&
                    a.formulas == DecompositionFormulas::corrected && aligned(a.keys, a.block_stride, a.token_stride) &&
                    aligned(a.query, a.query_token_stride, a.query_head_stride);
  if (!fits) return false;
  const size_t bytes = with_sizes(a, [&](auto element, auto dims) { return shared_bytes<decltype(element), dims.value>(a); });
  return bytes <= shared_memory_of_block();
}

size_t covariance_bytes(const DecomposeAttentionArguments& a) {
  return static_cast<size_t>(a.head_dim) * static_cast<size_t>(a.head_dim) * (a.cache_dtype == DType::f16 ? 2 : 4);
}

Status add_rows_mma(const Launch& launch) {
  return with_sizes(launch.a, [&](auto element, auto dims) {
    using T = decltype(element);
    constexpr int kDims = decltype(dims)::value;
    constexpr int kRunBytes = kStages * kRowKeys * kStride<kDims> * static_cast<int>(sizeof(T));
    cudaError_t error = cudaFuncSetAttribute(add_run<T, kDims>, cudaFuncAttributeMaxDynamicSharedMemorySize, kRunBytes);
    if (error != cudaSuccess) return cuda_status(error);
    const dim3 runs(static_cast<unsigned>(launch.runs) + 1, launch.kv_heads());
    add_run<T, kDims><<<runs, kThreads, kRunBytes, launch.stream>>>(launch);
    const Status status = add_up_runs(launch);
    if (!status.ok()) return status;
    constexpr int kChunkBytes = 2 * kMmaTokens * kStride<kDims> * static_cast<int>(sizeof(T));
    error = cudaFuncSetAttribute(make_covariances<T, kDims>, cudaFuncAttributeMaxDynamicSharedMemorySize, kChunkBytes);
    if (error != cudaSuccess) return cuda_status(error);
    make_covariances<T, kDims>
        <<<dim3(static_cast<unsigned>(launch.runs), launch.kv_heads()), kThreads, kChunkBytes, launch.stream>>>(launch);
    const size_t bytes = shared_bytes<T, kDims>(launch.a);
    const auto kernel = add_rows<T, kDims>;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (error != cudaSuccess) return cuda_status(error);
    const dim3 tiles(static_cast<unsigned>(launch.mma_tiles()), launch.kv_heads());
    kernel<<<tiles, kRowThreads, bytes, launch.stream>>>(launch);
    return launch_status();
  });
}

}  // namespace decomposition
}  // namespace kv
