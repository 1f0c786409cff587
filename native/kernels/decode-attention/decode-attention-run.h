// A few query rows against a run of keys or values that lie one after the other in memory. The lanes of a
// vector are dimensions, and each vector of the cache is converted once for all rows.
#pragma once

#include "kernels/simd.h"

namespace kv {
namespace KV_ISA {

// Query rows that share one pass over a run.
constexpr int kRowGroup = 4;
// Keys whose dot products are in flight together.
constexpr int kKeyGroup = 4;
// Output vectors of a row that stay in registers, with kRowGroup rows: 16 of 32 registers, or 8 of 16.
constexpr int kValueVectors = kLanes == 16 ? 4 : 2;

typedef float Quad __attribute__((vector_size(16)));

// Lane i of the result is lane pick(i) of a followed by b.
template <class Pick>
inline Vec shuffle(Vec a, Vec b, Pick pick) {
  VecInt lanes = {};
  for (int i = 0; i < kLanes; ++i) lanes[i] = pick(i);
  return __builtin_shuffle(a, b, lanes);
}

// Within each four lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3.
inline Vec add_halves(Vec a, Vec b) {
  return shuffle(a, b, [](int i) { return (i & ~3) + (i & 3) / 2 + (i & 1) * kLanes; }) +
         shuffle(a, b, [](int i) { return (i & ~3) + 2 + (i & 3) / 2 + (i & 1) * kLanes; });
}

// The sums over the lanes of a, b, c and d.
inline Quad horizontal_sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add_halves(a, b);
  const Vec cd = add_halves(c, d);
  const Vec quads = shuffle(ab, cd, [](int i) { return (i & ~3) + (i & 1) + (i & 2) / 2 * kLanes; }) +
                    shuffle(ab, cd, [](int i) { return (i & ~3) + 2 + (i & 1) + (i & 2) / 2 * kLanes; });
  Quad parts[kLanes / 4];
  std::memcpy(parts, &quads, sizeof parts);
  Quad total = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) total += parts[i];
  return total;
}

// scores[row * score_stride + key] = queries[row] . keys[key] for kRows rows and `count` keys. Query rows are
// `dim` floats apart; dim is a multiple of kLanes. Rounds the number of scores written up to kKeyGroup.
template <int kRows, class T>
inline void score_run(const float* queries, const T* keys, int64_t key_stride, int count, int dim,
                      float* scores, int64_t score_stride) {
  for (int key = 0; key < count; key += kKeyGroup) {
    const T* group[kKeyGroup];
    for (int k = 0; k < kKeyGroup; ++k)
      group[k] = keys + (key + k < count ? key + k : count - 1) * key_stride;
    Vec totals[kRows][kKeyGroup] = {};
    for (int d = 0; d < dim; d += kLanes) {
      Vec loaded[kKeyGroup];
#pragma GCC unroll 4
      for (int k = 0; k < kKeyGroup; ++k) loaded[k] = load(group[k] + d);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Vec query = load(queries + row * dim + d);
#pragma GCC unroll 4
        for (int k = 0; k < kKeyGroup; ++k) totals[row][k] += query * loaded[k];
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Quad sums = horizontal_sums(totals[row][0], totals[row][1], totals[row][2], totals[row][3]);
      std::memcpy(scores + row * score_stride + key, &sums, sizeof sums);
    }
  }
}

// output[row, 0 .. kVectors * kLanes) += sum over keys of weights[row * weight_stride + key] * values[key].
template <int kRows, int kVectors, class T>
inline void add_value_columns(const float* weights, int64_t weight_stride, const T* values,
                              int64_t value_stride, int count, float* output, int64_t output_stride) {
  Vec totals[kRows][kVectors];
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) totals[row][v] = load(output + row * output_stride + v * kLanes);
  }
  for (int key = 0; key < count; ++key) {
    Vec loaded[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) loaded[v] = load(values + key * value_stride + v * kLanes);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Vec weight = splat(weights[row * weight_stride + key]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) totals[row][v] += weight * loaded[v];
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(output + row * output_stride + v * kLanes, totals[row][v]);
  }
}

// As above for all `dim` columns, dim a multiple of kLanes; output rows are `dim` floats apart.
template <int kRows, class T>
inline void add_values(const float* weights, int64_t weight_stride, const T* values, int64_t value_stride,
                       int count, int dim, float* output) {
  int d = 0;
  for (; d + kValueVectors * kLanes <= dim; d += kValueVectors * kLanes) {
    add_value_columns<kRows, kValueVectors>(weights, weight_stride, values + d, value_stride, count,
                                            output + d, dim);
  }
  for (; d < dim; d += kLanes) {
    add_value_columns<kRows, 1>(weights, weight_stride, values + d, value_stride, count, output + d, dim);
  }
}

}  // namespace KV_ISA
}  // namespace kv
