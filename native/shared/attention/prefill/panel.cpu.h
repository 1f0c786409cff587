// A panel of query rows in prefill attention: what is kept of it between tiles of keys, and the softmax of its scores.
//
// Everything is transposed: scores are [key, row], outputs [dim, row], and the lanes of a vector are query rows. So the
// softmax needs no operation across lanes.
#pragma once

#include "shared/cpu/simd.cpu.h"
#if defined(KV_TILES)
#include "shared/cpu/tile-products.cpu.h"
#endif

namespace kv {
namespace KV_ISA {

constexpr int kTileKeys = 64;

// Of all kinds of panels:
// kTaskPanels: those that share each converted tile of keys. There are enough to make the conversion cheap, and few
// enough that their queries and outputs stay in L2.
// kTasksPerWorker: how many tasks each worker should find if there is enough work, so that all workers end at about the
// same time.
#if defined(KV_TILES)
constexpr int kPanelVectors = 2;
constexpr int64_t kTaskPanels = 16;
constexpr int64_t kTasksPerWorker = 4;

// Where vector v of row i is, of scores, weights and outputs: these are sums of blocks.
inline int place(int i, int v) { return (i / kTile * 2 + v) * static_cast<int>(kTileSums) + i % kTile * kTile; }
#else
constexpr int kPanelVectors = 3;
constexpr int64_t kTaskPanels = 8;
constexpr int64_t kTasksPerWorker = 8;

inline int place(int i, int v) { return (i * kPanelVectors + v) * kLanes; }
#endif
constexpr int kPanelRows = kPanelVectors * kLanes;

struct Panel {
  float* query;      // [dim, row], scaled
  float* output;     // [dim, row]: sum of exp(score - maximum) * value so far
  float* maximum;    // [row]
  float* sum;        // [row]: sum of exp(score - maximum) so far
  int32_t* visible;  // [row]: how many of the first keys the row sees
  int32_t most_visible;
  int32_t fewest_visible;
};

// How many of `count` keys from `first_key` on a row of the panel sees.
inline int reachable(const Panel& panel, int32_t first_key, int32_t count) {
  const int32_t visible = panel.most_visible - first_key;
  return visible < 0 ? 0 : visible < count ? visible : count;
}

// Hides the keys from `visible` on from each row.
inline void mask(const Panel& panel, int32_t first_key, int count, float* scores) {
  const int first_hidden = panel.fewest_visible > first_key ? panel.fewest_visible - first_key : 0;
  for (int v = 0; v < kPanelVectors; ++v) {
    VecInt visible;
    std::memcpy(&visible, panel.visible + v * kLanes, sizeof visible);
    for (int key = first_hidden; key < count; ++key) {
      float* score = scores + place(key, v);
      store(score, visible > first_key + key ? load(score) : splat(-__builtin_inff()));
    }
  }
}

// Raises the maxima to those of the scores, and returns them in `peak`, and in `rescale` the factors for the sums so far.
inline void raise_maxima(Panel& panel, int count, const float* scores, Vec* peak, Vec* rescale) {
  // The vectors of a row are computed side by side, because each is a chain of dependent steps.
  for (int v = 0; v < kPanelVectors; ++v) peak[v] = load(panel.maximum + v * kLanes);
  for (int key = 0; key < count; ++key) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) peak[v] = maximum(peak[v], load(scores + place(key, v)));
  }
  for (int v = 0; v < kPanelVectors; ++v) {
    rescale[v] = exponential(load(panel.maximum + v * kLanes) - peak[v]);
    store(panel.maximum + v * kLanes, peak[v]);
  }
}

}  // namespace KV_ISA
}  // namespace kv
