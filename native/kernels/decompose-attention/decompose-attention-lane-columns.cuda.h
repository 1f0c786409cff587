// Rows of keys and queries shared among the lanes of a warp: heads of 64 or 128 dims in a 16-bit dtype, all of whose dims
// are rotated.
#pragma once

#include <type_traits>

#include "kernels/decompose-attention/decompose-attention-key-block.cuda.h"

namespace kv {
namespace decomposition {

constexpr int kKeysAtOnce = 4;

// Whether a head's pairs are one or two columns of each lane.
inline bool has_whole_lanes(const Launch& launch) { return launch.tensor_cores && 2 * launch.a.pairs == launch.a.head_dim; }

// A lane has kColumns neighbouring columns of a row of keys or queries, in two pieces.
template <class T, int kColumns>
struct LaneColumns {
  using Piece = std::conditional_t<kColumns == 1, uint16_t, uint32_t>;
  struct Row {
    Piece pieces[2];
  };
  bool interleaved;
  int at[2];  // where the pieces begin

  __device__ explicit LaneColumns(const DecomposeAttentionArguments& a) : interleaved(a.convention == RopeConvention::interleaved) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    at[0] = (interleaved ? 2 : 1) * kColumns * lane;
    at[1] = at[0] + (interleaved ? kColumns : a.pairs);
  }
  __device__ Row load(const T* row) const {
    return {*reinterpret_cast<const Piece*>(row + at[0]), *reinterpret_cast<const Piece*>(row + at[1])};
  }
  // The two dims of each column.
  __device__ void unpack(const Row& row, float2 (&values)[kColumns]) const {
    uint32_t firsts = row.pieces[0];
    uint32_t seconds = row.pieces[1];
    if constexpr (kColumns == 2) {
      firsts = __byte_perm(row.pieces[0], row.pieces[1], interleaved ? 0x5410 : 0x3210);
      seconds = __byte_perm(row.pieces[0], row.pieces[1], interleaved ? 0x7632 : 0x7654);
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = {to_float(reinterpret_cast<const T*>(&firsts)[i]), to_float(reinterpret_cast<const T*>(&seconds)[i])};
    }
  }
  __device__ void store(double* line, const double2 (&values)[kColumns]) const {
    if constexpr (kColumns == 1) {
      line[at[0]] = values[0].x;
      line[at[1]] = values[0].y;
    } else {
      *reinterpret_cast<double2*>(line + at[0]) = {values[0].x, interleaved ? values[0].y : values[1].x};
      *reinterpret_cast<double2*>(line + at[1]) = {interleaved ? values[1].x : values[0].y, values[1].y};
    }
  }
};

// Sums over keys of a lane's columns: as they are cached, and before their rotation.
template <int kColumns>
struct LaneSums {
  float2 cached[kColumns];
  double2 plain[kColumns];

  // Adds those of kKeysAtOnce keys of a block from `from` on that are among first .. end - 1. All are loaded at once.
  template <class T>
  __device__ void add(const Launch& launch, const LaneColumns<T, kColumns>& columns, const KeyBlock<T>& block, int from,
                      int first, int end) {
    typename LaneColumns<T, kColumns>::Row rows[kKeysAtOnce];
    float2 turns[kKeysAtOnce][kColumns];
    const float2* of_lane = launch.memory.turns_of_key + static_cast<int>(threadIdx.x) % kWarp * kColumns;
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      rows[i] = columns.load(block.keys + (from + i) * block.stride);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) turns[i][j] = of_lane[(from + i) * kColumns * kWarp + j];
    }
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      if (from + i < first || from + i >= end) continue;
      float2 values[kColumns];
      columns.unpack(rows[i], values);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float2 before = turned_back(values[j], turns[i][j]);
        cached[j] = {cached[j].x + values[j].x, cached[j].y + values[j].y};
        plain[j] = {plain[j].x + before.x, plain[j].y + before.y};
      }
    }
  }
};

// Adds up the keys first .. end - 1 of a block. A warp has whole groups.
template <class T, int kColumns>
__device__ void add_up_lanes(const Launch& launch, const LaneColumns<T, kColumns>& columns, const KeyBlock<T>& block, int first,
                             int end) {
  const int own = static_cast<int>(threadIdx.x) % kWarp * kColumns;
  for (int group = static_cast<int>(threadIdx.x) / kWarp; group < kGroups; group += static_cast<int>(blockDim.x) / kWarp) {
    LaneSums<kColumns> sums{};
#pragma unroll
    for (int i = 0; i < kGroupKeys; i += kKeysAtOnce) sums.add(launch, columns, block, group * kGroupKeys + i, first, end);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      block.cached[group * kColumns * kWarp + own + i] = sums.cached[i];
      block.plain[group * kColumns * kWarp + own + i] = sums.plain[i];
    }
  }
}

}  // namespace decomposition
}  // namespace kv
