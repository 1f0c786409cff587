// The keys of kTurnTokens positions in shared memory.
#pragma once

#include "kernels/decompose-attention/decompose-attention.cuda.h"
#include "ptx/async-copy.cuda.h"

namespace kv {
namespace decomposition {

constexpr int kGroupKeys = 8;  // keys that are added up together
constexpr int kGroups = kTurnTokens / kGroupKeys;

// Elements of a key's row in shared memory, so that eight rows lie in other banks.
template <class T>
__host__ __device__ constexpr int key_stride(int dims) {
  return (dims * static_cast<int>(sizeof(T)) + 127) / 128 * (128 / static_cast<int>(sizeof(T))) + 16 / static_cast<int>(sizeof(T));
}

// Begins to copy the keys first .. end - 1 of the block at position `start` to shared memory, [key, key_stride], 16 bytes
// at a time. They are there after async_copy_wait and __syncthreads. `threads` are all that the thread block has.
template <class T>
__device__ void copy_aligned_block(const StoredKeys<T>& keys, int32_t start, int first, int end, T* to, int dims, int threads) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int stride = key_stride<T>(dims);
  const int thread = static_cast<int>(threadIdx.x);
  const int pieces = dims / kPiece;  // a power of two
  const int piece = thread % pieces * kPiece;
  const int step = threads / pieces;
  int key = first + thread / pieces;
  if (keys.block_tokens % kTurnTokens == 0) {
    // A block of the cache holds whole blocks of keys, so their place is found once.
    const T* from = keys.at(start) + key * keys.token_stride + piece;
    const int64_t of_step = step * keys.token_stride;
    to += key * stride + piece;
#pragma unroll 4
    for (; key < end; key += step, from += of_step, to += step * stride) ptx::async_copy_16(to, from, true);
  } else {
#pragma unroll 1
    for (; key < end; key += step) ptx::async_copy_16(to + key * stride + piece, keys.at(start + key) + piece, true);
  }
  ptx::async_copy_commit();
}

// The same of any keys.
template <class T>
__device__ void copy_block(const Launch& launch, const StoredKeys<T>& keys, int32_t start, int first, int end, T* to) {
  const int dims = launch.a.head_dim;
  if (launch.tensor_cores) return copy_aligned_block(keys, start, first, end, to, dims, static_cast<int>(blockDim.x));
  const int stride = key_stride<T>(dims);
#pragma unroll 1
  for (int i = first * dims + static_cast<int>(threadIdx.x); i < end * dims; i += static_cast<int>(blockDim.x)) {
    to[i / dims * stride + i % dims] = keys.at(start + i / dims)[i % dims];
  }
}

// A block of keys, and sums over each kGroupKeys of them.
template <class T>
struct KeyBlock {
  int columns;
  int stride;
  double2* plain;  // [group, column]: before their rotation, by the angle that their block does not share
  float2* cached;  // [group, column]: without their centre
  T* keys;         // [key, stride]

  __device__ KeyBlock(const DecomposeAttentionArguments& a, char* shared)
      : columns(columns_of(a)),
        stride(key_stride<T>(a.head_dim)),
        plain(reinterpret_cast<double2*>(shared)),
        cached(reinterpret_cast<float2*>(plain + kGroups * columns)),
        keys(reinterpret_cast<T*>(cached + kGroups * columns)) {}
  static size_t bytes(const DecomposeAttentionArguments& a) {
    return static_cast<size_t>(kGroups * columns_of(a)) * (sizeof(double2) + sizeof(float2)) +
           static_cast<size_t>(kTurnTokens * key_stride<T>(a.head_dim)) * sizeof(T);
  }

  // Adds those of kCount keys from `from` on that are among first .. end - 1 to the sums of a column, whose centre is
  // `middle`. All are loaded at once.
  template <int kCount>
  __device__ void add(const Launch& launch, const Column& column, int index, int from, int first, int end, float2 middle,
                      float2& of_cached, double2& of_plain) const {
    const bool turned = column.second >= 0;
    float2 values[kCount];
    float2 turns[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = from + i;
      const T* row = keys + key * stride;
      values[i] = {to_float(row[column.first]), turned ? to_float(row[column.second]) : 0};
      turns[i] = turned ? launch.memory.turns_of_key[key * launch.a.pairs + index] : make_float2(1, 0);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = from + i;
      if (key < first || key >= end) continue;
      const float2 before = turned_back(values[i], turns[i]);
      of_cached = {of_cached.x + (values[i].x - middle.x), of_cached.y + (values[i].y - middle.y)};
      of_plain = {of_plain.x + before.x, of_plain.y + before.y};
    }
  }

  // Adds up the keys first .. end - 1.
  __device__ void add_up(const Launch& launch, int head, int first, int end) const {
    const double* centre = launch.layout().centre(launch.a.state, head);
    for (int i = static_cast<int>(threadIdx.x); i < kGroups * columns; i += static_cast<int>(blockDim.x)) {
      const int group = i / columns;
      const int index = i - group * columns;
      const Column column(launch.a, index);
      const float2 middle = {static_cast<float>(centre[column.first]), column.second < 0 ? 0 : static_cast<float>(centre[column.second])};
      float2 of_cached = {0, 0};
      double2 of_plain = {0, 0};
      add<kGroupKeys>(launch, column, index, group * kGroupKeys, first, end, middle, of_cached, of_plain);
      plain[i] = of_plain;
      cached[i] = of_cached;
    }
  }

  // Replaces the sums of groups by those of all groups before.
  __device__ void add_up_groups() const {
    for (int index = static_cast<int>(threadIdx.x); index < columns; index += static_cast<int>(blockDim.x)) {
      float2 of_cached[kGroups];
      double2 of_plain[kGroups];
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        of_cached[i] = cached[i * columns + index];
        of_plain[i] = plain[i * columns + index];
      }
      float2 before_cached = {0, 0};
      double2 before_plain = {0, 0};
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        cached[i * columns + index] = before_cached;
        plain[i * columns + index] = before_plain;
        before_cached = {before_cached.x + of_cached[i].x, before_cached.y + of_cached[i].y};
        before_plain = {before_plain.x + of_plain[i].x, before_plain.y + of_plain[i].y};
      }
    }
  }
};

}  // namespace decomposition
}  // namespace kv
