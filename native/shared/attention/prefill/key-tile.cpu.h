// Multiplies one panel of query rows by one tile of keys in vector registers.
//
// Both products are the same micro-kernel. Keys and values are read in their natural layout, and no head size is
// special.
#pragma once

#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/panel.cpu.h"

namespace kv {
namespace KV_ISA {

// Result rows that one call of the micro-kernel holds in registers. One more register holds a broadcast and
// kPanelVectors hold loads, which fills the register file: 32 registers with AVX-512, 16 without.
constexpr int kStep = kLanes == 16 ? 8 : 4;

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

// Turns scores into exp(score - new maximum) and updates the statistics. Returns in `rescale` the factors for the
// sums so far.
inline void softmax_step(Panel& panel, int count, float* scores, Vec* rescale) {
  Vec peak[kPanelVectors];
  Vec sum[kPanelVectors];
  raise_maxima(panel, count, scores, peak, rescale);
  for (int v = 0; v < kPanelVectors; ++v) sum[v] = load(panel.sum + v * kLanes) * rescale[v];
  for (int key = 0; key < count; ++key) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      float* score = scores + place(key, v);
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

// Floats between rows of keys and values.
inline int row_stride(int dim) { return static_cast<int>(divide_up(dim, kStep)) * kStep; }

inline int64_t query_floats(int stride) { return int64_t{stride} * kPanelRows; }

// Reads the queries of `rows` rows, and how many keys they see.
template <class T>
inline void read_rows(const PagedAttentionArguments& a, const RowRange& range, int64_t first_row, int64_t rows,
                      int stride, Panel& panel) {
  std::memset(panel.query, 0, sizeof(float) * static_cast<size_t>(query_floats(stride)));
  for (int64_t row = 0; row < rows; ++row) {
    const T* query = range.query<T>(a, first_row + row);
    panel.visible[row] = range.visible(first_row + row);
    for (int d = 0; d < a.head_dim; ++d) panel.query[d * kPanelRows + row] = to_float(query[d]) * a.scale;
  }
}

// Multiplies panels by tiles.
struct PanelProducts {
  float* scores;

  static constexpr int64_t kFloats = kTileKeys * kPanelRows;
  explicit PanelProducts(float* memory) : scores(memory) {}

  // `Keys` and `Values` multiply as DenseTile does; of `count` keys from `first_key` on.
  template <class Keys, class Values>
  void attend(Panel* panels, int64_t panel_count, int32_t first_key, int32_t count, const Keys& keys, const Values& values) {
    for (Panel* panel = panels; panel < panels + panel_count; ++panel) {
      const int seen = reachable(*panel, first_key, count);
      if (seen == 0) continue;
      keys.score(panel->query, seen, scores);
      if (first_key + seen > panel->fewest_visible) mask(*panel, first_key, seen, scores);
      Vec rescale[kPanelVectors];
      softmax_step(*panel, seen, scores, rescale);
      values.add(scores, seen, rescale, panel->output);
    }
  }
};

}  // namespace KV_ISA
}  // namespace kv
