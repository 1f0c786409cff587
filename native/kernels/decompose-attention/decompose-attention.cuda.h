// What the kernels of one decomposition on a CUDA device share.
#pragma once

#define KV_ISA cuda
#include "kernels/decompose-attention/decompose-attention-interior.h"
#include "shared/cuda/divisor.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace decomposition {

using cuda::first_of_pair;
using cuda::Interior;
using cuda::InteriorSample;
using cuda::second_of_pair;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileTokens = 64;             // rows that share the sums over the keys that all have in their interior
constexpr int kRunTokens = 8 * kTileTokens;  // rows of a block
constexpr int kTurnTokens = 64;             // positions that share a base; keys of a block, and lags
constexpr int kMmaTokens = 128;             // rows of a tile on tensor cores
constexpr int kSegmentTiles = 256;          // of which so many have a place in memory; 32,768 rows
constexpr int kChunks = 256;
constexpr int kMostChunkTiles = 8;
constexpr int kMostDims = 256;
constexpr int kSquareDims = 16;  // rows and columns of a square of a symmetric matrix, on tensor cores
// The samples' products are added up in at most so many parts, of about so many samples at least, in a fixed order. With 8
// kv heads of 128 dims their thread blocks fill an H200 twice, and those of a step of 640 samples once.
constexpr int kMostSplits = 15;
constexpr int kSplitSamples = 128;

// In device memory. Arrays of kv heads come before those of rows or samples.
struct Memory {
  int32_t* fits;          // [1]: whether the tables are what the tensors say; else nothing is read or written
  double2* turns;         // [pair, kTurnTokens]: cosine and sine of the positions below kTurnTokens
  double2* bases;         // [block, pair]: of each kTurnTokens-th position
  float2* turns_of_pair;  // [pair, kTurnTokens]: the same as `turns` in f32
  float2* turns_of_key;   // [kTurnTokens, pair]
  double* key_sums;       // [kv_head, key_blocks, 2, dim]: of the interior's keys before a block: without their centre,
                          // and before their rotation
  // [kv_head, run + 1, dim, dim]: of keys without their centre, with those of all runs before. For tensor cores [kv_head,
  // mma tile + 1, dim, dim], of the keys of one tile each; squares of kSquareDims x kSquareDims below the diagonal are left
  // out.
  float* moments;
  float* tile_sums;       // [kv_head, mma tile + 1, dim]: of the same keys
  float* chunk_sums;      // [kv_head, chunk, chunk_values]: on Hopper in their place, products of keys and the keys' sums
  double* segment_sums;   // [kv_head, dim]: of the keys of all segments before
  char* covariances;      // [kv_head, mma tile, part, dim, dim], of the keys' dtype
  float* tile_means;      // [kv_head, mma tile, dim]
  float* tile_scales;     // [kv_head, mma tile]: what covariances are to be multiplied by
  float* last_means;      // [query_head]: of the last row
  float* variance;        // [query_head, row]
  float* log_shape;       // [query_head, row]
  InteriorSample* samples;  // [sample]
  int32_t* first_samples;   // [sampled block + 1]: the first sample whose row's interior ends in a block
  double* angles;         // [sample, 2 * pair]: what A of line 11 has for every kv head
  double* lines;          // [kv_head, sample, line_values]: the rest of A, and b of each query head as more columns
  uint8_t* kept;          // [kv_head, sample]: whether it is finite
  int32_t* left_out;      // [kv_head]: whether any sample is not
  double* gram_parts;     // [split, kv_head and one for all of them, coefficient + group, coefficient]
  double* systems;        // [kv_head, coefficient + group, coefficient]: the matrix, and right sides as more rows
  double* factors;        // [kv_head, factor_values]: of the matrix and the right sides
  double* solutions;      // [query_head, coefficient]
  double* middles;        // [kv_head, coefficient]: the means of the last row
  double2* offsets;       // [query_head]: slash and vertical part of these means
  double2* last_rows;     // [query_head, block]: maximum of the last row's logits, and sum of its exponentials
  double* zetas;          // [query_head]
  double* slash_sums;     // [query_head, token + 1]
  double* vertical_sums;  // [query_head, token + 1]
  double* block_sums;     // [2, query_head, block]: of the slash part and of the vertical part
};

struct Launch {
  DecomposeAttentionArguments a;
  Memory memory;
  int32_t runs;         // of rows, on tensor cores tiles
  int32_t first_tile;   // on tensor cores, of the segment
  int32_t samples;
  double weight;      // of a sample
  bool tensor_cores;  // whether they take these tensors
  bool hopper;        // whether they are Hopper's
  FaultSink faults;
  cudaStream_t stream;

  __host__ __device__ int blocks() const { return (a.tokens + kTurnTokens - 1) / kTurnTokens; }
  // Blocks of keys, and one for the sums over all.
  __host__ __device__ int key_blocks() const { return (a.tokens > a.sink_tokens ? a.tokens : a.sink_tokens) / kTurnTokens + 2; }
  __host__ __device__ int mma_tiles() const { return (a.rows + kMmaTokens - 1) / kMmaTokens; }
  __host__ __device__ int kept_tiles() const { return mma_tiles() < kSegmentTiles ? mma_tiles() : kSegmentTiles; }
  __host__ __device__ int segment_tiles() const {
    const int left = mma_tiles() - first_tile;
    return left < kSegmentTiles ? left : kSegmentTiles;
  }
  // Tiles whose keys a thread block of Hopper goes through. With as many tiles as a segment has, they fill an H200.
  __host__ __device__ int tiles_of_chunk() const {
    const int tiles = (kept_tiles() * a.kv_heads + kChunks - 1) / kChunks;
    return tiles < kMostChunkTiles ? tiles : kMostChunkTiles;
  }
  __host__ __device__ int chunks() const { return (kept_tiles() + tiles_of_chunk() - 1) / tiles_of_chunk(); }
  // Products of 64 x 64 dims on the diagonal and above it, and sums of keys.
  static constexpr int chunk_values(int dims) { return dims / 64 * (dims / 64 + 1) / 2 * 64 * 64 + dims; }
  __host__ __device__ int run_tokens() const { return tensor_cores ? kMmaTokens : kRunTokens; }
  // Where b is in a line. Even, so that pieces of 16 bytes are aligned.
  __host__ __device__ int sides_at() const { return (a.head_dim + 1) / 2 * 2; }
  __host__ __device__ int line_values() const { return sides_at() + (a.group() + 1) / 2 * 2; }
  __host__ __device__ int splits() const {
    const int splits = samples / kSplitSamples;
    return splits < 1 ? 1 : splits < kMostSplits ? splits : kMostSplits;
  }
  // Blocks in which the interiors of this call's rows end.
  __host__ __device__ int sampled_blocks(const Interior& interior) const {
    return interior.end(a.tokens - 1) / kTurnTokens - interior.end(interior.first_row) / kTurnTokens + 1;
  }
  // Tiles of 16 rows by 16 columns.
  __host__ __device__ int64_t factor_values() const {
    const int64_t columns = (a.coefficients() + 15) / 16;
    return (a.coefficients() + a.group() + 15) / 16 * columns * 256;
  }
  // Only where there are samples: else there is no interior, and nothing to estimate.
  __device__ const double* solution_of(int query_head) const { return memory.solutions + int64_t{query_head} * a.coefficients(); }
  __device__ double* sums_of_blocks(bool vertical, int query_head) const {
    return memory.block_sums + (int64_t{vertical} * a.query_heads + query_head) * blocks();
  }
  __device__ double* gram_part(int split, int head) const {
    const int64_t n = a.coefficients();
    return memory.gram_parts + (int64_t{split} * (a.kv_heads + 1) + head) * (n + a.group()) * n;
  }
  __host__ __device__ unsigned kv_heads() const { return static_cast<unsigned>(a.kv_heads); }
  __host__ __device__ unsigned query_heads() const { return static_cast<unsigned>(a.query_heads); }
  __host__ __device__ DecompositionState layout() const { return DecompositionState(a); }

  // The first key that this call adds to the sums over keys.
  __host__ __device__ int32_t first_key(const Interior& interior) const {
    return a.seen_tokens > 0 ? interior.end(a.seen_tokens - 1) : interior.sinks;
  }
  // Keys that run `run` adds: those before the interior's end of its first row; the last run those of the last row.
  __host__ __device__ int32_t run_end(const Interior& interior, int32_t run) const {
    return interior.end(run < runs ? interior.first_row + run * run_tokens() : a.tokens - 1);
  }
  __host__ __device__ int32_t run_first(const Interior& interior, int32_t run) const {
    return run > 0 ? run_end(interior, run - 1) : first_key(interior);
  }
  __device__ double* key_sums_before(int kv_head, int32_t block) const {
    return memory.key_sums + (int64_t{kv_head} * key_blocks() + block) * 2 * a.head_dim;
  }
};

// What one head's keys are read with.
template <class T>
struct StoredKeys {
  const T* pool;
  const int32_t* blocks;
  int64_t block_stride;
  int64_t token_stride;
  int32_t block_tokens;
  int32_t shift;  // of a token's block, or -1 if blocks have no power of two of tokens

  __device__ StoredKeys(const DecomposeAttentionArguments& a, int kv_head)
      : pool(static_cast<const T*>(a.keys)),
        blocks(a.block_table + (int64_t{a.slots[0]} * a.kv_heads + kv_head) * a.table_width),
        block_stride(a.block_stride),
        token_stride(a.token_stride),
        block_tokens(a.block_tokens),
        shift(shift_of(a.block_tokens)) {}
  __device__ const T* at(int32_t token) const {
    const int32_t block = shift >= 0 ? token >> shift : token / block_tokens;
    return pool + blocks[block] * block_stride + (token - block * block_tokens) * token_stride;
  }
};

template <class T>
__device__ const T* query_at(const DecomposeAttentionArguments& a, int64_t row, int query_head) {
  return static_cast<const T*>(a.query) + (a.query_start[0] + row) * a.query_token_stride + query_head * a.query_head_stride;
}

// Cosine and sine of a position's angle.
__device__ inline double2 turn_of(const Launch& launch, int32_t position, int pair) {
  const double2 base = launch.memory.bases[int64_t{position / kTurnTokens} * launch.a.pairs + pair];
  const double2 within = launch.memory.turns[pair * kTurnTokens + position % kTurnTokens];
  return {base.x * within.x - base.y * within.y, base.y * within.x + base.x * within.y};
}

// Keys are gone through column by column. A column is the two dims of a pair, or one dim that no pair rotates.
__host__ __device__ inline int columns_of(const DecomposeAttentionArguments& a) { return a.head_dim - a.pairs; }
struct Column {
  int first;
  int second;  // -1: none

  __device__ Column(const DecomposeAttentionArguments& a, int column)
      : first(column < a.pairs ? first_of_pair(a, column) : column + a.pairs),
        second(column < a.pairs ? second_of_pair(a, column) : -1) {}
};

// Two numbers rotated back by an angle. In f32 every kernel gets the same bits: least squares of few keys would show
// other roundings.
__device__ inline float2 turned_back(float2 pair, float2 turn) {
  return {__fmaf_rn(pair.x, turn.x, __fmul_rn(pair.y, turn.y)), __fmaf_rn(pair.y, turn.x, -__fmul_rn(pair.x, turn.y))};
}
__device__ inline double2 turned_back(double2 pair, double2 turn) {
  return {pair.x * turn.x + pair.y * turn.y, pair.y * turn.x - pair.x * turn.y};
}

// The sum over the lanes that hold other rows of the same columns of an mma's result.
__device__ inline double sum_of_rows(double x) {
  for (int distance = 4; distance < kWarp; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// The steps. choose_samples and add_keys are the first ones. The rows may then be computed beside the samples, the least
// squares and the parts that follow from them. write_horizontal needs all.
Status choose_samples(const Launch& launch);
Status add_keys(const Launch& launch);
Status add_samples(const Launch& launch);
Status write_whole_lines(const Launch& launch);
Status solve_least_squares(const Launch& launch);
Status write_slash(const Launch& launch);
Status write_vertical(const Launch& launch);
Status write_vertical_mma(const Launch& launch);
Status add_rows(const Launch& launch);
Status add_rows_mma(const Launch& launch);
Status write_horizontal(const Launch& launch);

namespace sm90a {
// Of at most 256 coefficients and 8 query heads of a kv head.
bool fits_cluster(const DecomposeAttentionArguments& arguments);
Status solve_least_squares(const Launch& launch);
}  // namespace sm90a

// Running sums over the runs of what they add to the moments.
Status add_up_runs(const Launch& launch);

// Whether tensor cores take these tensors: 16-bit keys and queries of the usual head sizes. write_whole_lines and
// write_vertical_mma also need every dim to be rotated.
bool fits_tensor_cores(const DecomposeAttentionArguments& arguments);
size_t covariance_bytes(const DecomposeAttentionArguments& arguments);  // of one tile

// Shared memory that a thread block may have on this device: 227 KB on Hopper, 99 KB on Ada; none if the device does not
// say. And how much of it the least squares take.
size_t shared_memory_of_block();
size_t solver_bytes(const DecomposeAttentionArguments& arguments);

}  // namespace decomposition
}  // namespace kv
