#include "shared/coded-keys/centroid-lists.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "shared/coded-keys/value-of-half.h"

namespace kv {
namespace {

constexpr size_t kMostListChunks = 24;
constexpr size_t kMostListed = kMostListChunks * kChunkCentroids;
// How many levels above the leaves witnesses begin to rule out centroids. Above, boxes are so large that they hardly can.
constexpr int kWitnessLevels = 5;
// From among so many neighbours in the tree, those that lie closest to the middle of the box.
constexpr size_t kNeighbours = 32;
constexpr size_t kNearNeighbours = 16;
// And in a leaf, of what is left.
constexpr size_t kNearMiddle = 24;
constexpr size_t kWitnessesAtOnce = 8;
// More of it makes lists at the edge longer.
constexpr float kMargin = 0.25f;
// The subtrees of this level are parts.
constexpr int kPartLevels = 5;
static_assert(size_t{1} << kPartLevels == CentroidLists::kMostParts);

// Centroids by their distance from something. Of equal distances, in the order of numbers.
uint64_t ranked(float distance, uint16_t number) {
  uint32_t bits;
  std::memcpy(&bits, &distance, 4);
  return uint64_t{bits} << 16 | number;
}
uint16_t number_of(uint64_t rank) { return static_cast<uint16_t>(rank); }
float distance_of(uint64_t rank) {
  const auto bits = static_cast<uint32_t>(rank >> 16);
  float distance;
  std::memcpy(&distance, &bits, 4);
  return distance;
}

struct Candidates {
  size_t count = 0;
  std::vector<uint16_t> numbers;
  std::vector<float> at[kMostListedDims];

  void reserve(size_t most) {
    if (numbers.size() >= most) return;
    numbers.resize(most);
    for (auto& each : at) each.resize(most);
  }
};

}  // namespace

// The tree of a book.
class CentroidLists::Tree {
 public:
  Tree(const uint16_t* book, int centroids, int dims)
      : shape_(centroids, dims), dims_(dims), points_(static_cast<size_t>(centroids) * dims), order_(distinct(book, centroids)) {
    while (2 << header_.levels <= static_cast<int>(order_.size())) ++header_.levels;
    splits_.resize(size_t{1} << header_.levels);
    split_node(0, 0, 0);
    set_domain();
  }

  const IndexShape& shape() const { return shape_; }
  const IndexHeader& header() const { return header_; }
  const std::vector<float>& splits() const { return splits_; }
  // The numbers of the centroids in the order of leaves. Of equal ones, the lowest.
  const std::vector<uint16_t>& order() const { return order_; }
  int dims() const { return dims_; }
  int levels() const { return header_.levels; }
  const float* at(uint16_t centroid) const { return &points_[static_cast<size_t>(centroid) * dims_]; }
  // Where the centroids of a leaf begin in that order.
  size_t place(int leaf) const { return order_.size() * static_cast<size_t>(leaf) >> header_.levels; }

  LeafBox domain() const {
    LeafBox box;
    for (int d = 0; d < dims_; ++d) box.lowest[d] = header_.lowest[d], box.highest[d] = header_.highest[d];
    return box;
  }

  // The box of a node's first child, or of its second.
  LeafBox child(size_t node, const LeafBox& box, bool second) const {
    uint32_t bits;
    std::memcpy(&bits, &splits_[node], 4);
    const auto dim = bits & 3;
    const float place = std::min(std::max(splits_[node], box.lowest[dim]), box.highest[dim]);
    LeafBox part = box;
    (second ? part.lowest : part.highest)[dim] = place;
    return part;
  }

 private:
  // All centroids but those that equal one of a lower number, which would never be found.
  std::vector<uint16_t> distinct(const uint16_t* book, int centroids) {
    for (size_t i = 0; i < points_.size(); ++i) points_[i] = static_cast<float>(value_of_half(book[i]));
    std::vector<uint16_t> list(static_cast<size_t>(centroids));
    std::iota(list.begin(), list.end(), static_cast<uint16_t>(0));
    std::sort(list.begin(), list.end(), [&](uint16_t a, uint16_t b) {
      for (int d = 0; d < dims_; ++d) {
        if (at(a)[d] != at(b)[d]) return at(a)[d] < at(b)[d];
      }
      return a < b;
    });
    const auto equal = [&](uint16_t a, uint16_t b) { return std::equal(at(a), at(a) + dims_, at(b)); };
    list.erase(std::unique(list.begin(), list.end(), equal), list.end());
    return list;
  }

  // The box of all centroids, and some room around it.
  void set_domain() {
    float extent = 0;
    for (int d = 0; d < dims_; ++d) {
      bounds_of(order_.begin(), order_.end(), d, header_.lowest[d], header_.highest[d]);
      extent = std::max(extent, header_.highest[d] - header_.lowest[d]);
    }
    for (int d = 0; d < dims_; ++d) {
      header_.lowest[d] -= kMargin * extent;
      header_.highest[d] += kMargin * extent;
    }
  }

  template <class Iterator>
  void bounds_of(Iterator first, Iterator end, int dim, float& lowest, float& highest) const {
    lowest = highest = at(*first)[dim];
    for (auto i = first; i != end; ++i) {
      lowest = std::min(lowest, at(*i)[dim]);
      highest = std::max(highest, at(*i)[dim]);
    }
  }

  // Between the centroids of the node, whose first leaf is `leaf`, in the dim in which they lie furthest apart.
  void split_node(size_t node, int level, int leaf) {
    const int leaves = 1 << (header_.levels - level);
    if (leaves == 1) return;
    const auto first = order_.begin() + static_cast<std::ptrdiff_t>(place(leaf));
    const auto middle = order_.begin() + static_cast<std::ptrdiff_t>(place(leaf + leaves / 2));
    const auto end = order_.begin() + static_cast<std::ptrdiff_t>(place(leaf + leaves));
    int dim = 0;
    float widest = -1;
    for (int d = 0; d < dims_; ++d) {
      float lowest, highest;
      bounds_of(first, end, d, lowest, highest);
      if (highest - lowest > widest) widest = highest - lowest, dim = d;
    }
    std::nth_element(first, middle, end, [&](uint16_t a, uint16_t b) { return at(a)[dim] != at(b)[dim] ? at(a)[dim] < at(b)[dim] : a < b; });
    float lowest, below;
    bounds_of(first, middle, dim, lowest, below);
    splits_[node] = split_at(0.5f * below + 0.5f * at(*middle)[dim], dim);
    split_node(2 * node + 1, level + 1, leaf);
    split_node(2 * node + 2, level + 1, leaf + leaves / 2);
  }

  static float split_at(float place, int dim) {
    uint32_t bits;
    std::memcpy(&bits, &place, 4);
    bits = (bits & ~3u) | static_cast<uint32_t>(dim);
    std::memcpy(&place, &bits, 4);
    return place;
  }

  IndexShape shape_;
  int dims_;
  std::vector<float> points_;
  std::vector<uint16_t> order_;
  IndexHeader header_{};
  std::vector<float> splits_;
};

// The lists of the leaves of a subtree.
class CentroidLists::Part {
 public:
  // Of the node of this number among those of its level.
  Part(const Tree& tree, const ListLoops& loops, int level, int number) : tree_(tree), loops_(loops), dims_(tree.dims()) {
    const std::vector<uint16_t>& order = tree.order();
    candidates_.resize(static_cast<size_t>(tree.levels()) + 2);
    for (auto* each : {&least_, &most_, &nearer_}) each->resize(order.size());
    Candidates& all = candidates_[0];
    all.reserve(order.size());
    for (const uint16_t c : order) {
      for (int d = 0; d < dims_; ++d) all.at[d][all.count] = tree.at(c)[d];
      all.numbers[all.count++] = c;
    }
    size_t node = 0;
    LeafBox box = tree.domain();
    for (int above = 0; above < level; ++above) {
      const int below = tree.levels() - above;
      narrow(above, number >> (level - above) << below, 1 << below, box);
      const bool second = (number >> (level - 1 - above) & 1) != 0;
      box = tree.child(node, box, second);
      node = 2 * node + (second ? 2 : 1);
    }
    list_node(node, level, number << (tree.levels() - level), box);
    candidates_.clear();
  }

  size_t leaves() const { return begins_.size() - 1; }
  size_t chunks_of(size_t leaf) const { return (begins_[leaf + 1] - begins_[leaf] + kChunkCentroids - 1) / kChunkCentroids; }

  // Writes up to so many chunks of a leaf, and returns how many.
  size_t write(size_t leaf, size_t most, uint16_t* chunks) const {
    const size_t count = std::min(most, chunks_of(leaf));
    for (size_t i = 0; i < count; ++i) write_chunk(chunks + 8 * i, begins_[leaf] + i * kChunkCentroids, begins_[leaf + 1], i + 1 == count);
    return count;
  }

 private:
  void list_node(size_t node, int level, int leaf, const LeafBox& box) {
    const int leaves = 1 << (tree_.levels() - level);
    narrow(level, leaf, leaves, box);
    if (leaves == 1) return list_leaf();
    list_node(2 * node + 1, level + 1, leaf, tree_.child(node, box, false));
    list_node(2 * node + 2, level + 1, leaf + leaves / 2, tree_.child(node, box, true));
  }

  // Leaves of the parent's candidates those that can be nearest somewhere in the node's box.
  void narrow(int level, int leaf, int leaves, const LeafBox& box) {
    const Candidates& from = candidates_[static_cast<size_t>(level)];
    Candidates& to = candidates_[static_cast<size_t>(level) + 1];
    to.reserve(from.count);
    loops_.distances({from.at[0].data(), from.at[1].data(), from.at[2].data(), from.at[3].data()}, from.count, box, least_.data(), most_.data());
    // One of them is nowhere in the box further away.
    const float furthest = *std::min_element(most_.begin(), most_.begin() + static_cast<std::ptrdiff_t>(from.count)) * 1.00001f;
    keep(from, to, [least = least_.data(), furthest](size_t i) { return least[i] <= furthest; });
    if (tree_.levels() - level > kWitnessLevels) return;
    Witness witness;
    for (int d = 0; d < dims_; ++d) {
      witness.middle[d] = 0.5f * box.lowest[d] + 0.5f * box.highest[d];
      witness.half[d] = std::max(box.highest[d] - witness.middle[d], witness.middle[d] - box.lowest[d]) * 1.000001f;
      witness.half_square += witness.half[d] * witness.half[d];
    }
    rank_neighbours(leaf, leaves, witness);
    rule_out(to, kNearNeighbours, witness);
    if (leaves > 1) return;
    loops_.from_point({to.at[0].data(), to.at[1].data(), to.at[2].data(), to.at[3].data()}, to.count, witness.middle, most_.data());
    ranks_.clear();
    for (size_t i = 0; i < to.count; ++i) ranks_.push_back(ranked(most_[i], to.numbers[i]));
    rule_out(to, kNearMiddle, witness);
  }

  // Boxes at the edge have their middles far from all centroids. But their neighbours in the tree are not.
  void rank_neighbours(int leaf, int leaves, const Witness& witness) {
    const std::vector<uint16_t>& order = tree_.order();
    const size_t own = tree_.place(leaf + leaves) - tree_.place(leaf);
    const size_t used = std::min(order.size(), std::max(own, kNeighbours));
    const size_t first = std::min(tree_.place(leaf) / used * used, order.size() - used);
    ranks_.clear();
    for (size_t i = first; i < first + used; ++i) {
      float square = 0;
      for (int d = 0; d < dims_; ++d) {
        const float away = tree_.at(order[i])[d] - witness.middle[d];
        square += away * away;
      }
      ranks_.push_back(ranked(square, order[i]));
    }
  }

  // With the best ranked as witnesses.
  void rule_out(Candidates& to, size_t most, Witness& witness) {
    const size_t witnesses = std::min(most, ranks_.size());
    const auto end = ranks_.begin() + static_cast<std::ptrdiff_t>(witnesses);
    if (witnesses < ranks_.size()) std::nth_element(ranks_.begin(), end, ranks_.end());
    std::sort(ranks_.begin(), end);
    for (size_t first = 0; first < witnesses; first += kWitnessesAtOnce) {
      std::fill_n(nearer_.begin(), to.count, 0.0f);
      for (size_t i = first; i < std::min(first + kWitnessesAtOnce, witnesses); ++i) {
        witness.square = distance_of(ranks_[i]);
        for (int d = 0; d < dims_; ++d) witness.at[d] = tree_.at(number_of(ranks_[i]))[d] - witness.middle[d];
        loops_.rule_out({to.at[0].data(), to.at[1].data(), to.at[2].data(), to.at[3].data()}, to.count, witness, nearer_.data());
      }
      keep(to, to, [nearer = nearer_.data()](size_t i) { return !(nearer[i] > 0); });
    }
  }

  // Copies candidates with their distances from the box.
  template <class Kept>
  void keep(const Candidates& from, Candidates& to, Kept&& kept) {
    static_assert(kMostListedDims == 4);
    const size_t all = from.count;
    const uint16_t* numbers = from.numbers.data();
    const float *c0 = from.at[0].data(), *c1 = from.at[1].data(), *c2 = from.at[2].data(), *c3 = from.at[3].data();
    uint16_t* to_numbers = to.numbers.data();
    float *to0 = to.at[0].data(), *to1 = to.at[1].data(), *to2 = to.at[2].data(), *to3 = to.at[3].data();
    float* least = least_.data();
    size_t count = 0;
    for (size_t i = 0; i < all; ++i) {
      const bool stays = kept(i);
      to_numbers[count] = numbers[i];
      to0[count] = c0[i], to1[count] = c1[i], to2[count] = c2[i], to3[count] = c3[i];
      least[count] = least[i];
      count += stays ? 1 : 0;
    }
    to.count = count;
  }

  void list_leaf() {
    const Candidates& left = candidates_.back();
    ranks_.clear();
    for (size_t i = 0; i < left.count; ++i) ranks_.push_back(ranked(least_[i], left.numbers[i]));
    // One more than fit say how close the others are.
    const auto end = ranks_.begin() + static_cast<std::ptrdiff_t>(std::min(ranks_.size(), kMostListed + 1));
    if (end != ranks_.end()) std::nth_element(ranks_.begin(), end, ranks_.end());
    std::sort(ranks_.begin(), end);
    listed_.insert(listed_.end(), ranks_.begin(), end);
    begins_.push_back(listed_.size());
  }

  void write_chunk(uint16_t* chunk, size_t first, size_t end, bool last) const {
    for (size_t i = 0; i < kChunkCentroids; ++i) chunk[i] = static_cast<uint16_t>(2 * dims_ * number_of(listed_[std::min(first + i, end - 1)]));
    std::sort(chunk, chunk + kChunkCentroids);
    // Below the square of the distance, whatever rounding does to it and to those that are compared with it.
    const float bound = first + kChunkCentroids < end ? distance_of(listed_[first + kChunkCentroids]) * 0.9999f : INFINITY;
    uint32_t bits;
    std::memcpy(&bits, &bound, 4);
    chunk[kChunkCentroids] = static_cast<uint16_t>(bits >> 16 | (last ? 0x8000u : 0u));
  }

  const Tree& tree_;
  const ListLoops& loops_;
  int dims_;
  std::vector<Candidates> candidates_;  // of all, and of the node of each level
  std::vector<float> least_, most_, nearer_;
  std::vector<uint64_t> ranks_;
  std::vector<uint64_t> listed_;  // leaf after leaf
  std::vector<size_t> begins_{0};
};

CentroidLists::CentroidLists(const uint16_t* book, int centroids, int sub_dim) : tree_(std::make_unique<Tree>(book, centroids, sub_dim)) {
  parts_.resize(parts());
}
CentroidLists::~CentroidLists() = default;

size_t CentroidLists::parts() const { return size_t{1} << std::min(tree_->levels(), kPartLevels); }

void CentroidLists::list(size_t part, const ListLoops& loops) {
  parts_[part] = std::make_unique<Part>(*tree_, loops, std::min(tree_->levels(), kPartLevels), static_cast<int>(part));
}

// Of a list, so that all lists have room.
size_t CentroidLists::most_chunks() const {
  for (size_t most = kMostListChunks;; --most) {
    size_t all = 0;
    for (const auto& part : parts_) {
      for (size_t leaf = 0; leaf < part->leaves(); ++leaf) all += std::min(most, part->chunks_of(leaf));
    }
    if (all <= static_cast<size_t>(tree_->shape().most_chunks)) return most;
  }
}

void CentroidLists::write(uint8_t* index) const {
  const IndexShape& shape = tree_->shape();
  std::memcpy(index, &tree_->header(), sizeof(IndexHeader));
  std::memcpy(index + kIndexHeaderBytes, tree_->splits().data(), tree_->splits().size() * 4);
  auto* starts = reinterpret_cast<uint16_t*>(index + shape.second());
  auto* chunks = reinterpret_cast<uint16_t*>(index + shape.third());
  const size_t most = most_chunks();
  size_t chunk = 0;
  for (const auto& part : parts_) {
    for (size_t leaf = 0; leaf < part->leaves(); ++leaf) {
      *starts++ = static_cast<uint16_t>(chunk);
      chunk += part->write(leaf, most, chunks + 8 * chunk);
    }
  }
}

}  // namespace kv
