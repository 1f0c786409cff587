#include "kernels/encode-keys/encode-keys.h"

#include "runtime/workers.h"
#include "shared/coded-keys/centroid-index.h"
#include "shared/coded-keys/coded-keys.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// The nearest centroids of one book.
class Book {
 public:
  Book(const EncodeKeysArguments& a, int head, int group)
      : shape_(a.centroid_count, a.sub_dim),
        centroids_(a.centroids + a.book_offset(head, group)),
        count_(a.centroid_count),
        dims_(a.sub_dim),
        index_(a.index + a.book_offset(head, group) / a.book_elements() * shape_.bytes()) {
    std::memcpy(&header_, index_, sizeof header_);
  }

  int nearest(const float* x) const { return indexed(x) ? nearest_in_leaf(x) : nearest_of_all(x); }

 private:
  struct Nearest {
    float distance;
    int centroid;
  };

  // What an index says is checked where it could lead outside of memory, for it may hold anything.
  bool indexed(const float* x) const {
    if (dims_ > kMostIndexedDims || header_.levels < 0 || header_.levels > shape_.most_levels) return false;
    for (int d = 0; d < dims_; ++d) {
      if (!(x[d] >= header_.lowest[d] && x[d] <= header_.highest[d])) return false;
    }
    return true;
  }

  int nearest_in_leaf(const float* x) const {
    const uint8_t* splits = index_ + kIndexHeaderBytes;
    int node = 0;
    for (int level = 0; level < header_.levels; ++level) {
      uint32_t bits;
      std::memcpy(&bits, splits + 4 * node, 4);
      float split;
      std::memcpy(&split, &bits, 4);
      const int dim = static_cast<int>(bits & 1);
      node = 2 * node + (x[dim < dims_ ? dim : 0] < split ? 1 : 2);
    }
    Nearest best = start();
    for (int chunk = node + 1 - (1 << header_.levels);;) {
      uint16_t entries[kChunkCentroids + 1];
      std::memcpy(entries, index_ + shape_.chunk_offset() + int64_t{16} * chunk, sizeof entries);
      for (int i = 0; i < kChunkCentroids; ++i) compare(x, entries[i] < count_ ? entries[i] : count_ - 1, best);
      const int next = entries[kChunkCentroids];
      if (next <= chunk || next >= shape_.most_chunks) return best.centroid;
      chunk = next;
    }
  }

  int nearest_of_all(const float* x) const {
    Nearest best = start();
    for (int c = 0; c < count_; ++c) compare(x, c, best);
    return best.centroid;
  }

  static Nearest start() { return {__builtin_inff(), 0}; }

  void compare(const float* x, int centroid, Nearest& best) const {
    const uint16_t* elements = centroids_ + int64_t{centroid} * dims_;
    float distance = 0;
    for (int d = 0; d < dims_; ++d) {
      const float away = x[d] - half_to_float(elements[d]);
      distance += away * away;
    }
    if (distance < best.distance) best = {distance, centroid};
  }

  IndexShape shape_;
  const uint16_t* centroids_;
  int count_;
  int dims_;
  const uint8_t* index_;
  IndexHeader header_;
};

template <class T>
void encode_chunk(const EncodeKeysArguments& a, int64_t copy, int number, const T* block) {
  const CodeChunk chunk = chunk_of(a, a.to[copy], number);
  const int head = a.heads[copy];
  const float* scales = a.channel_scale == nullptr ? nullptr : a.channel_scale + int64_t{head} * a.head_dim;
  for (int quad = 0; quad < chunk.quads; ++quad) {
    uint16_t codes[kChunkOctets][kStreamCodes] = {};
    for (int g = 0; g < kQuadGroups; ++g) {
      const int group = number * kChunkGroups + quad * kQuadGroups + g;
      if (group >= a.groups()) break;
      const Book book(a, head, group);
      for (int octet = 0; octet < kChunkOctets; ++octet) {
        for (int place = g; place < kStreamCodes; place += kQuadGroups) {
          float x[kMostCodedDims];
          const int64_t first = token_of(octet, place) * a.token_stride;
          for (int i = 0; i < a.sub_dim; ++i) {
            const int dim = group * a.sub_dim + i;
            x[i] = to_float(block[first + dim]);
            if (scales != nullptr) x[i] /= scales[dim];
          }
          codes[octet][place] = static_cast<uint16_t>(book.nearest(x));
        }
      }
    }
    for (int octet = 0; octet < kChunkOctets; ++octet) chunk.write(octet * chunk.quads + quad, codes[octet]);
  }
}

}  // namespace

void encode_keys(const EncodeKeysArguments& a, Workers& workers) {
  const int chunks = coded_chunks(a.groups());
  workers.for_each(static_cast<size_t>(a.copies) * chunks, [&](size_t index, int) {
    const int64_t copy = static_cast<int64_t>(index) / chunks;
    with_float_type(a.dtype, [&](auto element) {
      const auto* dense = static_cast<const decltype(element)*>(a.keys);
      encode_chunk(a, copy, static_cast<int>(index) % chunks, dense + a.from[copy] * a.block_stride);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
