// A search structure over the centroids of one book, which finds the nearest one exactly, as comparing with every centroid
// would find it.
//
// Distances are f32: the squares of x - c, summed in the order of dims, each operation rounded, and nothing multiplied and
// added in one step. So every device finds the same centroid, and of equally near ones that of the lowest number.
//
// An index is bytes, an IndexHeader at first. What it says is checked where it could lead outside of memory, for a tensor
// may hold anything.
//
// Of sub-vectors of one to four dims: a binary tree over space, and for each leaf the centroids that can be the nearest one
// of a sub-vector there, those closest to the leaf first.
//   splits: f32. The children of node n are 2 n + 1 and 2 n + 2; a sub-vector x goes to the first if x[dim] < split. The
//     lowest two bits of a split are that dim.
//   starts: u16 [leaf], the first chunk of each.
//   chunks: u16 [chunk, 8]: where seven centroids begin in the book, in bytes, in ascending order; and the upper half of an
//     f32, rounded down, whose sign is no part of it: no other centroid is nearer to the leaf than that distance, squared.
//     So the search ends when it has found a nearer one, else it goes on with the next chunk. With the sign the list ends.
//   What is not found so, and sub-vectors outside of the header's box, are compared with every centroid.
//
// Of five to eight dims such lists are too long. A binary tree has up to eight centroids in each leaf, and the box of the
// centroids of each node: a node is passed over if its box is further away than the nearest centroid so far.
//   boxes: f16 [node, lowest | highest, dim], in the order of splits.
//   numbers: u16 [centroid], those of the centroids in the order of leaves: leaf i has those from centroids * i / leaves on.
//   centroids: f16 [centroid, dim], in that order.
//
// Sub-vectors of more dims have no index, and are compared with every centroid.
#pragma once

#include <cstdint>

namespace kv {

constexpr int kMostListedDims = 4;
constexpr int kMostIndexedDims = 8;
constexpr int kChunkCentroids = 7;
constexpr int kChunkWords = 4;
constexpr int kLeafCentroids = 8;
constexpr int kIndexHeaderBytes = 48;

struct IndexHeader {
  int32_t levels;  // the tree has 2^levels leaves
  float lowest[kMostListedDims];
  float highest[kMostListedDims];
};
static_assert(sizeof(IndexHeader) <= kIndexHeaderBytes);

// The room that an index has. All parts begin at multiples of 16 bytes.
struct IndexShape {
  int most_levels = 0;  // of boxes: the levels
  int most_chunks = 0;
  int64_t first_bytes = 16;   // of splits or boxes
  int64_t second_bytes = 0;   // of starts or numbers
  int64_t third_bytes = 0;    // of chunks or centroids

  constexpr IndexShape(int centroids, int sub_dim) {
    if (sub_dim <= kMostListedDims) {
      while (2 << most_levels <= centroids) ++most_levels;
      const int of_centroid = sub_dim < 3 ? 2 : 1 << (sub_dim - 1);
      most_chunks = of_centroid * centroids;
      first_bytes = whole(int64_t{4} << most_levels);
      second_bytes = whole(int64_t{2} << most_levels);
      third_bytes = int64_t{4} * kChunkWords * most_chunks;
    } else if (sub_dim <= kMostIndexedDims) {
      while (kLeafCentroids << most_levels < centroids) ++most_levels;
      first_bytes = whole(int64_t{4} * sub_dim * ((2 << most_levels) - 1));
      second_bytes = whole(int64_t{2} * centroids);
      third_bytes = whole(int64_t{2} * centroids * sub_dim);
    }
  }

  constexpr int64_t second() const { return kIndexHeaderBytes + first_bytes; }
  constexpr int64_t third() const { return second() + second_bytes; }
  constexpr int64_t bytes() const { return third() + third_bytes; }

 private:
  static constexpr int64_t whole(int64_t bytes) { return (bytes + 15) / 16 * 16; }
};

// Whether a box at this distance, or anything in it, is further away than `nearest`, whatever rounding did to both.
constexpr bool certainly_further(float box, float nearest) { return box * 0.99999f > nearest; }

// What is left of a walk through the boxes: it visits the nodes of a subtree, or passes over them. The leaves before
// `leaf` are done.
struct BoxWalk {
  int levels;
  int level = 0;
  int leaf = 0;

  constexpr explicit BoxWalk(int of_levels) : levels(of_levels) {}

  constexpr bool done() const { return leaf == 1 << levels; }
  constexpr int node() const { return (1 << level) - 1 + (leaf >> (levels - level)); }
  constexpr bool at_leaf() const { return level == levels; }
  constexpr void enter() { ++level; }
  // The next node is the largest subtree that begins behind this one's last leaf.
  constexpr void pass() {
    leaf += 1 << (levels - level);
    while (level > 0 && (leaf >> (levels - level)) % 2 == 0) --level;
  }
};

}  // namespace kv
