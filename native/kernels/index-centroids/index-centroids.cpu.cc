#include "kernels/index-centroids/index-centroids.h"

#include "runtime/workers.h"
#include "shared/coded-keys/build-centroid-indices.h"

namespace kv {
namespace KV_ISA {
namespace {

using Coordinates = const float* const (&)[kMostListedDims];

void distances(Coordinates at, size_t count, const LeafBox& box, float* __restrict least, float* __restrict most) {
  for (int d = 0; d < kMostListedDims; ++d) {
    const float* __restrict c = at[d];
    const float lowest = box.lowest[d], highest = box.highest[d];
    for (size_t i = 0; i < count; ++i) {
      const float below = lowest - c[i], above = c[i] - highest;
      const float out = below > above ? below : above;
      const float in = below > above ? above : below;
      const float away = out > 0 ? out : 0;
      least[i] = d == 0 ? away * away : least[i] + away * away;
      most[i] = d == 0 ? in * in : most[i] + in * in;
    }
  }
}

void from_point(Coordinates at, size_t count, const float* point, float* __restrict squares) {
  for (int d = 0; d < kMostListedDims; ++d) {
    const float* __restrict c = at[d];
    const float x = point[d];
    for (size_t i = 0; i < count; ++i) {
      const float away = c[i] - x;
      squares[i] = d == 0 ? away * away : squares[i] + away * away;
    }
  }
}

float magnitude(float x) { return x < 0 ? -x : x; }

void rule_out(Coordinates at, size_t count, const Witness& witness, float* __restrict nearer) {
  const Witness w = witness;
  const float *__restrict c0 = at[0], *__restrict c1 = at[1], *__restrict c2 = at[2], *__restrict c3 = at[3];
  for (size_t i = 0; i < count; ++i) {
    const float x0 = c0[i] - w.middle[0], x1 = c1[i] - w.middle[1], x2 = c2[i] - w.middle[2], x3 = c3[i] - w.middle[3];
    const float square = (x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3);
    const float corner = (magnitude(x0 - w.at[0]) * w.half[0] + magnitude(x1 - w.at[1]) * w.half[1]) +
                         (magnitude(x2 - w.at[2]) * w.half[2] + magnitude(x3 - w.at[3]) * w.half[3]);
    const float rounding = 1e-5f * (square + w.square + w.half_square) + 1e-37f;
    const float advantage = square - w.square - 2 * corner - rounding;
    nearer[i] = advantage > nearer[i] ? advantage : nearer[i];
  }
}

}  // namespace

void index_centroids(const IndexCentroidsArguments& a, Workers& workers) {
  build_centroid_indices(a.centroids, a.books, a.centroid_count, a.sub_dim, a.index, {distances, from_point, rule_out}, workers);
}

}  // namespace KV_ISA
}  // namespace kv
