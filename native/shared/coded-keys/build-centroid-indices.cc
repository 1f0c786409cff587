#include "shared/coded-keys/build-centroid-indices.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/workers.h"
#include "shared/coded-keys/value-of-half.h"

namespace kv {
namespace {

// What is made of lists before they are written takes some MiB for each.
constexpr size_t kBooksAtOnce = 16;

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
  double value(int centroid, int dim) const { return value_of_half(book_[centroid * dims_ + dim]); }

  IndexShape shape_;
  const uint16_t* book_;
  int centroids_;
  int dims_;
  uint16_t* boxes_;
  std::vector<uint16_t> numbers_;
};

}  // namespace

void build_centroid_indices(const uint16_t* books, int64_t count, int centroids, int sub_dim, uint8_t* indices,
                            const ListLoops& loops, Workers& workers) {
  const auto bytes = static_cast<size_t>(IndexShape(centroids, sub_dim).bytes());
  std::memset(indices, 0, bytes * static_cast<size_t>(count));
  const auto book = [&](size_t number) { return books + static_cast<int64_t>(number) * centroids * sub_dim; };
  if (sub_dim > kMostListedDims && sub_dim <= kMostIndexedDims) {
    workers.for_each(static_cast<size_t>(count), [&](size_t number, int) { BoxBuilder(book(number), centroids, sub_dim, indices + bytes * number); });
  }
  if (sub_dim > kMostListedDims) return;
  for (size_t first = 0; first < static_cast<size_t>(count); first += kBooksAtOnce) {
    std::vector<std::unique_ptr<CentroidLists>> lists(std::min(kBooksAtOnce, static_cast<size_t>(count) - first));
    workers.for_each(lists.size(), [&](size_t i, int) { lists[i] = std::make_unique<CentroidLists>(book(first + i), centroids, sub_dim); });
    workers.for_each(lists.size() * CentroidLists::kMostParts, [&](size_t i, int) {
      CentroidLists& own = *lists[i / CentroidLists::kMostParts];
      if (i % CentroidLists::kMostParts < own.parts()) own.list(i % CentroidLists::kMostParts, loops);
    });
    workers.for_each(lists.size(), [&](size_t i, int) { lists[i]->write(indices + bytes * (first + i)); });
  }
}

}  // namespace kv
