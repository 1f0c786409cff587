// Multiplies one panel of query rows by one tile of keys.
//
// Everything is transposed: scores are [key, row], outputs [dim, row], and the lanes of a vector are query rows. Both
// products are then the same micro-kernel. Keys and values are read in their natural layout, no head size is special,
// and the softmax needs no operation across lanes.
#pragma once

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

constexpr int kPanelVectors = 3;
constexpr int kPanelRows = kPanelVectors * kLanes;
constexpr int kTileKeys = 64;
// Result rows that one call of the micro-kernel holds in registers. One more register holds a broadcast and
// kPanelVectors hold loads, which fills the register file: 32 registers with AVX-512, 16 without.
constexpr int kStep = kLanes == 16 ? 8 : 4;

struct Panel {
  float* query;      // [dim, row], scaled
  float* output;     // [dim rounded up to kStep, row]: sum of exp(score - maximum) * value so far
  float* maximum;    // [row]
  float* sum;        // [row]: sum of exp(score - maximum) so far
  int32_t* visible;  // [row]: how many of the first keys the row sees
  int32_t most_visible;
  int32_t fewest_visible;
};

// result[i, row] = rescale[row] * result[i, row] + sum_k left[i, k] * right[k, row] for kStep values of i. Without
// `rescale` the old result is ignored.
template <bool kRescale>
__attribute__((always_inline)) inline void multiply(const float* left, int64_t left_stride,
                                                    int64_t left_depth_stride, const float* right, int depth,
                                                    const Vec* rescale, float* result) {
  Vec total[kStep][kPanelVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kStep; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      total[i][v] = kRescale ? load(result + i * kPanelRows + v * kLanes) * rescale[v] : Vec{};
    }
  }
  for (int k = 0; k < depth; ++k) {
    Vec rows[kPanelVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) rows[v] = load(right + k * kPanelRows + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kStep; ++i) {
      const Vec factor = splat(left[i * left_stride + k * left_depth_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) total[i][v] += factor * rows[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kStep; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) store(result + i * kPanelRows + v * kLanes, total[i][v]);
  }
}

// Hides the keys from `visible` on from each row.
inline void mask(const Panel& panel, int32_t first_key, int count, float* scores) {
  const int first_hidden = panel.fewest_visible > first_key ? panel.fewest_visible - first_key : 0;
  for (int v = 0; v < kPanelVectors; ++v) {
    VecInt visible;
    std::memcpy(&visible, panel.visible + v * kLanes, sizeof visible);
    for (int key = first_hidden; key < count; ++key) {
      float* score = scores + key * kPanelRows + v * kLanes;
      store(score, visible > first_key + key ? load(score) : splat(-__builtin_inff()));
    }
  }
}

// Turns scores into exp(score - new maximum) and updates the statistics. Returns in `rescale` the factors for the
// sums so far.
inline void softmax_step(Panel& panel, int count, float* scores, Vec* rescale) {
  // The vectors of a row are computed side by side, because each is a chain of dependent steps.
  Vec peak[kPanelVectors];
  Vec sum[kPanelVectors];
  for (int v = 0; v < kPanelVectors; ++v) peak[v] = load(panel.maximum + v * kLanes);
  for (int key = 0; key < count; ++key) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v)
      peak[v] = maximum(peak[v], load(scores + key * kPanelRows + v * kLanes));
  }
  for (int v = 0; v < kPanelVectors; ++v) {
    rescale[v] = exponential(load(panel.maximum + v * kLanes) - peak[v]);
    sum[v] = load(panel.sum + v * kLanes) * rescale[v];
    store(panel.maximum + v * kLanes, peak[v]);
  }
  for (int key = 0; key < count; ++key) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      float* score = scores + key * kPanelRows + v * kLanes;
      const Vec weight = exponential(load(score) - peak[v]);
      store(score, weight);
      sum[v] += weight;
    }
  }
  for (int v = 0; v < kPanelVectors; ++v) store(panel.sum + v * kLanes, sum[v]);
}

// The keys (or values) of a tile, converted to f32, [key, dim]. Rows are `stride` floats apart, a multiple of kStep.
struct DenseTile {
  const float* rows;
  int stride;
  int dim;

  // scores[key, row] = keys[key] . query[row] for `count` keys and up to kStep - 1 more.
  void score(const float* query, int count, float* scores) const {
    for (int key = 0; key < count; key += kStep) {
      multiply<false>(rows + key * stride, stride, 1, query, dim, nullptr, scores + key * kPanelRows);
    }
  }

  // output[d, row] = rescale[row] * output[d, row] + sum over `count` keys of values[key, d] * weights[key, row]
  void add(const float* weights, int count, const Vec* rescale, float* output) const {
    for (int d = 0; d < dim; d += kStep) {
      multiply<true>(rows + d, 1, stride, weights, count, rescale, output + d * kPanelRows);
    }
  }
};

// `Keys` and `Values` multiply as DenseTile does. `scores` has room for kTileKeys * kPanelRows floats.
template <class Keys, class Values>
inline void attend(Panel& panel, int32_t first_key, int32_t tile_keys, const Keys& keys, const Values& values,
                   float* scores) {
  const int32_t reachable = panel.most_visible - first_key;
  const int count = tile_keys < reachable ? tile_keys : reachable;
  if (count <= 0) return;
  keys.score(panel.query, count, scores);
  if (first_key + count > panel.fewest_visible) mask(panel, first_key, count, scores);
  Vec rescale[kPanelVectors];
  softmax_step(panel, count, scores, rescale);
  values.add(scores, count, rescale, panel.output);
}

}  // namespace KV_ISA
}  // namespace kv
