#include "shared/coded-keys/centroid-index.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace kv {
namespace {

// So many candidates at the most are tried whether they rule others out of a box.
constexpr size_t kWitnesses = 200;

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa + 1024, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

float split_at(double place, int dim) {
  const float rounded = static_cast<float>(place);
  uint32_t bits;
  std::memcpy(&bits, &rounded, 4);
  bits = (bits & ~1u) | static_cast<uint32_t>(dim);
  float split;
  std::memcpy(&split, &bits, 4);
  return split;
}

struct Box {
  double lowest[kMostListedDims] = {};
  double highest[kMostListedDims] = {};

  double moved_into(double x, int dim) const { return std::min(std::max(x, lowest[dim]), highest[dim]); }
};

using Candidates = std::vector<uint16_t>;

// Of one or two dims.
class ListBuilder {
 public:
  ListBuilder(const uint16_t* book, int centroids, int dims)
      : shape_(centroids, dims), dims_(dims), points_(static_cast<size_t>(centroids) * dims) {
    for (size_t i = 0; i < points_.size(); ++i) points_[i] = half_value(book[i]);
    const Box box = domain(centroids);
    const Candidates all = distinct(centroids);
    // Fewer levels where lists are so long that the chunks do not suffice. Without any, they do.
    for (header_.levels = shape_.most_levels; !fill(box, all); --header_.levels) {
    }
  }

  void write(uint8_t* index) const {
    std::memcpy(index, &header_, sizeof header_);
    if (!splits_.empty()) std::memcpy(index + kIndexHeaderBytes, splits_.data(), splits_.size() * 4);
    std::memcpy(index + shape_.second(), chunks_.data(), chunks_.size() * 2);
  }

 private:
  const double* at(int centroid) const { return &points_[static_cast<size_t>(centroid) * dims_]; }

  // What the tree covers: the box of all centroids, and around it as much again.
  Box domain(int centroids) {
    Box box;
    double extent = 0;
    for (int d = 0; d < dims_; ++d) {
      box.lowest[d] = box.highest[d] = at(0)[d];
      for (int c = 1; c < centroids; ++c) {
        box.lowest[d] = std::min(box.lowest[d], at(c)[d]);
        box.highest[d] = std::max(box.highest[d], at(c)[d]);
      }
      extent = std::max(extent, box.highest[d] - box.lowest[d]);
    }
    for (int d = 0; d < dims_; ++d) {
      box.lowest[d] = header_.lowest[d] = static_cast<float>(box.lowest[d] - extent);
      box.highest[d] = header_.highest[d] = static_cast<float>(box.highest[d] + extent);
    }
    return box;
  }

  // All centroids but those that equal one of a lower number, which would never be found.
  Candidates distinct(int centroids) const {
    Candidates list(static_cast<size_t>(centroids));
    for (int c = 0; c < centroids; ++c) list[c] = static_cast<uint16_t>(c);
    const auto compare = [&](uint16_t a, uint16_t b) {
      for (int d = 0; d < dims_; ++d) {
        if (at(a)[d] != at(b)[d]) return at(a)[d] < at(b)[d] ? -1 : 1;
      }
      return 0;
    };
    std::sort(list.begin(), list.end(), [&](uint16_t a, uint16_t b) {
      const int order = compare(a, b);
      return order != 0 ? order < 0 : a < b;
    });
    const auto equal = [&](uint16_t a, uint16_t b) { return compare(a, b) == 0; };
    list.erase(std::unique(list.begin(), list.end(), equal), list.end());
    std::sort(list.begin(), list.end());
    return list;
  }

  // These return false when there are too few chunks.

  bool fill(const Box& box, const Candidates& all) {
    splits_.assign((size_t{1} << header_.levels) - 1, 0.0f);
    chunks_.assign(size_t{8} << header_.levels, 0);
    return fill_node(0, 0, box, all);
  }

  bool fill_node(size_t node, int level, const Box& box, const Candidates& candidates) {
    if (level == header_.levels) return write_leaf(node - splits_.size(), candidates);
    int dim = 0;
    const float split = choose_split(box, candidates, dim);
    splits_[node] = split;
    Box first = box, second = box;
    first.highest[dim] = second.lowest[dim] = box.moved_into(split, dim);
    return fill_node(2 * node + 1, level + 1, first, possible(first, candidates)) &&
           fill_node(2 * node + 2, level + 1, second, possible(second, candidates));
  }

  bool write_leaf(size_t chunk, const Candidates& candidates) {
    for (size_t first = 0; first < candidates.size(); first += kChunkCentroids) {
      if (first > 0) {
        const size_t next = chunks_.size() / 8;
        if (next >= static_cast<size_t>(shape_.most_chunks)) return false;
        chunks_[8 * chunk + kChunkCentroids] = static_cast<uint16_t>(next);
        chunks_.resize(chunks_.size() + 8);
        chunk = next;
      }
      for (size_t i = 0; i < kChunkCentroids; ++i) {
        chunks_[8 * chunk + i] = candidates[std::min(first + i, candidates.size() - 1)];
      }
    }
    return true;
  }

  // Halfway to the median candidate, in the dim in which they lie furthest apart, each moved into the box.
  float choose_split(const Box& box, const Candidates& candidates, int& dim) {
    double widest = -1;
    for (int d = 0; d < dims_; ++d) {
      double lowest = box.highest[d], highest = box.lowest[d];
      for (const uint16_t c : candidates) {
        lowest = std::min(lowest, box.moved_into(at(c)[d], d));
        highest = std::max(highest, box.moved_into(at(c)[d], d));
      }
      if (highest - lowest > widest) widest = highest - lowest, dim = d;
    }
    places_.clear();
    for (const uint16_t c : candidates) places_.push_back(box.moved_into(at(c)[dim], dim));
    const auto middle = places_.begin() + static_cast<std::ptrdiff_t>(places_.size() / 2);
    std::nth_element(places_.begin(), middle, places_.end());
    double below = box.lowest[dim];
    for (const double x : places_) {
      if (x < *middle) below = std::max(below, x);
    }
    return split_at((below + *middle) / 2, dim);
  }

  // The candidates that no other one is certainly nearer than, wherever in the box a sub-vector lies.
  Candidates possible(const Box& box, const Candidates& candidates) {
    witnesses_.clear();
    const size_t step = 1 + candidates.size() / kWitnesses;
    for (size_t i = 0; i < candidates.size(); i += step) witnesses_.push_back({distance(box, candidates[i]), candidates[i]});
    std::sort(witnesses_.begin(), witnesses_.end());
    Candidates left;
    for (const uint16_t c : candidates) {
      const double own = distance(box, c);
      bool ruled_out = false;
      for (const auto& [other, near] : witnesses_) {
        // What is no nearer to the middle of the box than c is not nearer everywhere.
        if (ruled_out || other >= own) break;
        ruled_out = rules_out(box, near, c);
      }
      if (!ruled_out) left.push_back(c);
    }
    return left;
  }

  // Of a centroid from the middle of the box, squared.
  double distance(const Box& box, uint16_t centroid) const {
    double sum = 0;
    for (int d = 0; d < dims_; ++d) {
      const double away = (box.lowest[d] + box.highest[d]) / 2 - at(centroid)[d];
      sum += away * away;
    }
    return sum;
  }

  // Whether the f32 distance to `near` is less than that to `far` throughout the box. The difference of the squared
  // distances is linear, so it is least in a corner. A computed distance is at most dims + 2 roundings off.
  bool rules_out(const Box& box, uint16_t near, uint16_t far) const {
    double least_advantage = 0;
    double furthest = 0;
    for (int d = 0; d < dims_; ++d) {
      const double n = at(near)[d], f = at(far)[d];
      const double low = (n - f) * (2 * box.lowest[d] - n - f);
      const double high = (n - f) * (2 * box.highest[d] - n - f);
      least_advantage += std::min(low, high);
      furthest += std::max((box.lowest[d] - n) * (box.lowest[d] - n), (box.highest[d] - n) * (box.highest[d] - n));
    }
    const double rounding = (dims_ + 3) * 0x1p-24;
    return least_advantage > 2.5 * rounding * furthest + 1e-40;
  }

  IndexShape shape_;
  int dims_;
  std::vector<double> points_;
  IndexHeader header_{};
  std::vector<float> splits_;
  std::vector<uint16_t> chunks_;
  std::vector<double> places_;
  std::vector<std::pair<double, uint16_t>> witnesses_;
};

// Of three dims and more.
class BoxBuilder {
 public:
  BoxBuilder(const uint16_t* book, int centroids, int dims, uint8_t* index)
      : shape_(centroids, dims),
        book_(book),
        centroids_(centroids),
        dims_(dims),
        boxes_(reinterpret_cast<uint16_t*>(index + kIndexHeaderBytes)),
        numbers_(static_cast<size_t>(centroids)) {
    for (int c = 0; c < centroids; ++c) numbers_[c] = static_cast<uint16_t>(c);
    fill_node(0, 0, 0);
    IndexHeader header{};
    header.levels = shape_.most_levels;
    std::memcpy(index, &header, sizeof header);
    std::memcpy(index + shape_.second(), numbers_.data(), numbers_.size() * 2);
    auto* ordered = reinterpret_cast<uint16_t*>(index + shape_.third());
    for (const uint16_t c : numbers_) ordered = std::copy_n(book + int64_t{c} * dims, dims, ordered);
  }

 private:
  // The node's first leaf is `leaf`, and so many levels are below it as are left.
  void fill_node(int node, int level, int leaf) {
    const int leaves = 1 << (shape_.most_levels - level);
    const auto first = numbers_.begin() + place(leaf), end = numbers_.begin() + place(leaf + leaves);
    int widest = 0;
    double extent = -1;
    for (int d = 0; d < dims_; ++d) {
      const auto less = [&](uint16_t a, uint16_t b) { return value(a, d) < value(b, d); };
      const auto [lowest, highest] = std::minmax_element(first, end, less);
      boxes_[(2 * node) * dims_ + d] = book_[*lowest * dims_ + d];
      boxes_[(2 * node + 1) * dims_ + d] = book_[*highest * dims_ + d];
      if (value(*highest, d) - value(*lowest, d) > extent) extent = value(*highest, d) - value(*lowest, d), widest = d;
    }
    if (leaves == 1) {
      std::sort(first, end);
      return;
    }
    const auto before = [&](uint16_t a, uint16_t b) {
      return value(a, widest) != value(b, widest) ? value(a, widest) < value(b, widest) : a < b;
    };
    std::nth_element(first, numbers_.begin() + place(leaf + leaves / 2), end, before);
    fill_node(2 * node + 1, level + 1, leaf);
    fill_node(2 * node + 2, level + 1, leaf + leaves / 2);
  }

  std::ptrdiff_t place(int leaf) const { return static_cast<std::ptrdiff_t>(int64_t{centroids_} * leaf >> shape_.most_levels); }
  double value(int centroid, int dim) const { return half_value(book_[centroid * dims_ + dim]); }

  IndexShape shape_;
  const uint16_t* book_;
  int centroids_;
  int dims_;
  uint16_t* boxes_;
  std::vector<uint16_t> numbers_;
};

}  // namespace

void build_centroid_index(const uint16_t* book, int centroids, int sub_dim, uint8_t* index) {
  std::memset(index, 0, static_cast<size_t>(IndexShape(centroids, sub_dim).bytes()));
  if (sub_dim <= kMostListedDims) {
    ListBuilder(book, centroids, sub_dim).write(index);
  } else if (sub_dim <= kMostIndexedDims) {
    BoxBuilder(book, centroids, sub_dim, index);
  }
}

}  // namespace kv
