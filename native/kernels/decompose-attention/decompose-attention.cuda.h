// What the kernels of one decomposition on a CUDA device share.
#pragma once

#define KV_ISA cuda
#include "kernels/decompose-attention/decompose-attention-interior.h"
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
constexpr int kTurnTokens = 64;             // positions that share a base
constexpr int kMostDims = 256;
constexpr int kSplits = 16;  // parts of the samples whose products are added up apart; fixed, and so is their order

// In device memory. Arrays of kv heads come before those of rows or samples.
struct Memory {
  int32_t* fits;          // [1]: whether the tables are what the tensors say; else nothing is read or written
  double2* turns;         // [pair, kTurnTokens]: cosine and sine of the positions below kTurnTokens
  double2* bases;         // [block, pair]: of each kTurnTokens-th position
  float* moments;         // [kv_head, run + 1, dim, dim]: of keys without their centre, with those of all runs before
  double* key_sums;       // [kv_head, run + 1, dim]
  double* plain_sums;     // [kv_head, run + 1, dim]
  float* mean;            // [query_head, row]
  float* variance;        // [query_head, row]
  float* log_shape;       // [query_head, row]
  InteriorSample* samples;  // [sample]
  double* angles;         // [sample, 2 * pair]: what A of line 11 has for every kv head
  double* regressors;     // [kv_head, sample, coefficient]: A
  double* wanted;         // [query_head, sample]: b
  int32_t* left_out;      // [kv_head, sample]: whether it is not finite
  double* gram_parts;     // [split, kv_head, coefficient, coefficient]
  double* right_parts;    // [split, query_head, coefficient]
  double* systems;        // [kv_head, coefficient + group, coefficient]: the matrix, and right sides as more rows
  double* solutions;      // [query_head, coefficient]
  double* middles;        // [kv_head, coefficient]: the means of the last row
  double2* last_rows;     // [query_head, block]: maximum and sum of the last row's exponentials
  double* zetas;          // [query_head]
  double* slash_sums;     // [query_head, token + 1]
  double* vertical_sums;  // [query_head, token + 1]
};

struct Launch {
  DecomposeAttentionArguments a;
  Memory memory;
  int32_t runs;
  int32_t samples;
  double weight;  // of a sample
  FaultSink faults;
  cudaStream_t stream;

  __host__ __device__ int blocks() const { return (a.tokens + kTurnTokens - 1) / kTurnTokens; }
  __host__ __device__ unsigned kv_heads() const { return static_cast<unsigned>(a.kv_heads); }
  __host__ __device__ unsigned query_heads() const { return static_cast<unsigned>(a.query_heads); }
  __host__ __device__ DecompositionState layout() const { return DecompositionState(a); }

  // Keys that run `run` adds: those before the interior's end of its first row; the last run those of the last row.
  __host__ __device__ int32_t run_end(const Interior& interior, int32_t run) const {
    return interior.end(run < runs ? interior.first_row + run * kRunTokens : a.tokens - 1);
  }
  __host__ __device__ int32_t run_first(const Interior& interior, int32_t run) const {
    if (run > 0) return run_end(interior, run - 1);
    return a.seen_tokens > 0 ? interior.end(a.seen_tokens - 1) : interior.sinks;
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

  __device__ StoredKeys(const DecomposeAttentionArguments& a, int kv_head)
      : pool(static_cast<const T*>(a.keys)),
        blocks(a.block_table + (int64_t{a.slots[0]} * a.kv_heads + kv_head) * a.table_width),
        block_stride(a.block_stride),
        token_stride(a.token_stride),
        block_tokens(a.block_tokens) {}
  __device__ const T* at(int32_t token) const {
    return pool + blocks[token / block_tokens] * block_stride + token % block_tokens * token_stride;
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

// Dim `dim` of a key before its rotation.
template <class T>
__device__ float plain_of(const Launch& launch, const T* key, int32_t position, int dim) {
  const DecomposeAttentionArguments& a = launch.a;
  const float own = to_float(key[dim]);
  if (dim >= 2 * a.pairs) return own;
  const bool interleaved = a.convention == RopeConvention::interleaved;
  const int pair = interleaved ? dim / 2 : dim % a.pairs;
  const bool first = dim == first_of_pair(a, pair);
  const double2 turn = turn_of(launch, position, pair);
  const double partner = to_float(key[first ? second_of_pair(a, pair) : first_of_pair(a, pair)]);
  const double turned = first ? own * turn.x + partner * turn.y : own * turn.x - partner * turn.y;
  return static_cast<float>(turned / static_cast<double>(a.attention_scale));
}

Status add_keys_and_rows(const Launch& launch);
Status solve_least_squares(const Launch& launch);
Status write_parts(const Launch& launch);

}  // namespace decomposition
}  // namespace kv
