// Multiplies a 2:4 sparse tile of keys or values by a panel of query rows, in prefill attention. A sparse tile takes
// half as many products as a dense one.
#pragma once

#include "shared/attention/prefill/key-tile.cpu.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {
namespace KV_ISA {

static_assert(kTileKeys == kBlock24Tokens, "a tile is a block");

// The kept elements of a block as factors of a product. Row i, which is a key or a dim of the values, has `depth`
// factors. Each factor multiplies the floats of a panel at a place. Factor and place n of row i are at index(i, n).
// kStep rows are interleaved.
struct SparseTile {
  float* factors;
  int32_t* places;
  int rows;
  int depth;

  static int64_t floats(int dim) { return int64_t{64} * dim; }

  SparseTile(float* memory, int rows, int depth)
      : factors(memory), places(reinterpret_cast<int32_t*>(memory + rows * depth)), rows(rows), depth(depth) {}

  int index(int row, int n) const { return (row / kStep * depth + n) * kStep + row % kStep; }

  void score(const float* query, int count, float* scores) const {
    for (int key = 0; key < count; key += kStep) multiply_step<false>(key, query, nullptr, scores);
  }

  // Writes zeros after the `count` keys that have weights.
  void add(float* weights, int count, const Vec* rescale, float* output) const {
    std::memset(weights + count * kPanelRows, 0,
                static_cast<size_t>(kTileKeys - count) * kPanelRows * sizeof(float));
    for (int d = 0; d < rows; d += kStep) multiply_step<true>(d, weights, rescale, output);
  }

 private:
  // result[i, row] = rescale[row] * result[i, row] + sum_n factor(i, n) * right[place(i, n) + row] for kStep values
  // of i from `first` on.
  template <bool kRescale>
  void multiply_step(int first, const float* right, const Vec* rescale, float* result) const {
    result += first * kPanelRows;
    const float* factor = factors + first * depth;
    const int32_t* place = places + first * depth;
    Vec total[kStep][kPanelVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        total[i][v] = kRescale ? load(result + i * kPanelRows + v * kLanes) * rescale[v] : Vec{};
      }
    }
    for (int n = 0; n < depth; ++n, factor += kStep, place += kStep) {
#pragma GCC unroll 8
      for (int i = 0; i < kStep; ++i) {
        const Vec left = splat(factor[i]);
        const float* row = right + place[i];
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) total[i][v] += left * load(row + v * kLanes);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) store(result + i * kPanelRows + v * kLanes, total[i][v]);
    }
  }
};

template <class T>
inline void load_sparse_keys(const T* non_zeros, const uint32_t* metadata, int dim, const SparseTile& tile) {
  for (int token = 0; token < kBlock24Tokens; ++token) {
    for (int group = 0; group < dim / 16; ++group) {
      const Meta16Place place = key_meta16(token, group, dim);
      uint32_t meta = metadata[place.word] >> place.shift;
      const T* kept = non_zeros + key_non_zero(token, 8 * group, dim);
      for (int n = 0; n < 8; ++n, meta >>= 2) {
        const int at = tile.index(token, 8 * group + n);
        tile.factors[at] = to_float(kept[n]);
        tile.places[at] = (16 * group + n / 2 * 4 + static_cast<int>(meta & 3)) * kPanelRows;
      }
    }
  }
}

template <class T>
inline void load_sparse_values(const T* non_zeros, const uint32_t* metadata, int dim, const SparseTile& tile) {
  for (int d = 0; d < dim; ++d) {
    for (int group = 0; group < 4; ++group) {
      const Meta16Place place = value_meta16(d, group);
      uint32_t meta = metadata[place.word] >> place.shift;
      for (int n = 0; n < 8; ++n, meta >>= 2) {
        const int at = tile.index(d, 8 * group + n);
        tile.factors[at] = to_float(non_zeros[value_non_zero(8 * group + n, d)]);
        tile.places[at] = (16 * group + n / 2 * 4 + static_cast<int>(meta & 3)) * kPanelRows;
      }
    }
  }
}

}  // namespace KV_ISA
}  // namespace kv
