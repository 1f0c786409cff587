// Lists of the centroids that can be the nearest one of a sub-vector in each leaf of a tree (centroid-index.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shared/coded-keys/centroid-index.h"

namespace kv {

// Part of space, with its bounds.
struct LeafBox {
  float lowest[kMostListedDims] = {};
  float highest[kMostListedDims] = {};
};

// A box by its middle, and a centroid relative to the middle that may be nearer than others in all of the box.
struct Witness {
  float middle[kMostListedDims] = {};
  float half[kMostListedDims] = {};
  float half_square = 0;
  float at[kMostListedDims] = {};
  float square = 0;
};

// What takes long in making lists, for one instruction set. `at` is [dim][centroid], zeros in dims that there are not.
struct ListLoops {
  // Squared distances of centroids from the closest and from the furthest point of a box.
  void (*distances)(const float* const (&at)[kMostListedDims], size_t count, const LeafBox& box, float* least, float* most);
  // Squared distances from a point.
  void (*from_point)(const float* const (&at)[kMostListedDims], size_t count, const float* point, float* squares);
  // Raises `nearer` above 0 where the witness is nearer than the centroid in all of the box, whatever rounding does.
  void (*rule_out)(const float* const (&at)[kMostListedDims], size_t count, const Witness& witness, float* nearer);
};

// The lists of a book, made part after part, on any threads.
class CentroidLists {
 public:
  static constexpr size_t kMostParts = 32;

  // f16 [centroid, sub_dim] of up to kMostListedDims dims, all finite. May throw std::bad_alloc, as what follows.
  CentroidLists(const uint16_t* book, int centroids, int sub_dim);
  ~CentroidLists();

  // At most kMostParts.
  size_t parts() const;
  void list(size_t part, const ListLoops& loops);
  // Fills in the index, when all parts are listed.
  void write(uint8_t* index) const;

 private:
  class Tree;
  class Part;

  size_t most_chunks() const;

  std::unique_ptr<Tree> tree_;
  std::vector<std::unique_ptr<Part>> parts_;
};

}  // namespace kv
