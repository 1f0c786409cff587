// A search structure over the centroids of one book, for sub-vectors of one or two dims: a binary tree over the plane, and
// for each leaf all centroids that can be the nearest one of a sub-vector there. So the nearest is exact, as comparing
// with every centroid would find it. For sub-vectors of more dims such lists are too long, and all centroids are compared.
//
// Distances are f32: the squares of x - c, summed in the order of dims, each operation rounded, and nothing multiplied and
// added in one step. So every device finds the same centroid, and of equally near ones that of the lowest number.
//
// An index is bytes: an IndexHeader; at kIndexHeaderBytes the splits of the tree's inner nodes; behind them the chunks.
//   splits: f32. The children of node n are 2 n + 1 and 2 n + 2; a sub-vector x goes to the first if x[dim] < split. The
//     lowest bit of a split is that dim.
//   chunks: u16 [chunk, 8]: seven centroids in ascending order, the last one repeated where there are fewer, and the
//     number of the chunk that continues, which is a later one, or 0. The first chunks are the leaves.
// Sub-vectors outside of the header's box are compared with every centroid.
#pragma once

#include <cstdint>

namespace kv {

constexpr int kMostIndexedDims = 2;
constexpr int kMostIndexLevels = 12;
constexpr int kChunkCentroids = 7;
constexpr int kIndexHeaderBytes = 32;

struct IndexHeader {
  int32_t levels;  // the tree has 2^levels leaves
  float lowest[kMostIndexedDims];
  float highest[kMostIndexedDims];
};
static_assert(sizeof(IndexHeader) <= kIndexHeaderBytes);

// The room that an index has.
struct IndexShape {
  int most_levels = 0;
  int most_chunks = 0;

  constexpr IndexShape(int centroids, int sub_dim) {
    if (sub_dim > kMostIndexedDims) return;
    // Two centroids for each leaf.
    while (most_levels < kMostIndexLevels && 4 << most_levels <= centroids) ++most_levels;
    // Leaves may continue; without splits, all centroids are in one leaf.
    const int all = (centroids + kChunkCentroids - 1) / kChunkCentroids;
    most_chunks = 2 << most_levels > all ? 2 << most_levels : all;
  }

  constexpr int64_t chunk_offset() const { return kIndexHeaderBytes + (int64_t{4} << (most_levels < 2 ? 2 : most_levels)); }
  constexpr int64_t bytes() const { return chunk_offset() + int64_t{16} * most_chunks; }
};

// Fills in the index of a book, f16 [centroid, sub_dim], all finite. May throw std::bad_alloc.
void build_centroid_index(const uint16_t* book, int centroids, int sub_dim, uint8_t* index);

}  // namespace kv
