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

  // Below 0 if none is near.
  int nearest(const float* x) const {
    if (header_.levels < 0 || header_.levels > shape_.most_levels || dims_ > kMostIndexedDims) return nearest_of_all(x);
    if (dims_ > kMostListedDims) return header_.levels == shape_.most_levels ? nearest_in_boxes(x) : nearest_of_all(x);
    const int listed = inside(x) ? nearest_in_list(x) : -1;
    return listed >= 0 ? listed : nearest_of_all(x);
  }

 private:
  struct Nearest {
    float distance = __builtin_inff();
    int centroid = -1;

    void take(float other, int number) {
      if (other < distance || (other == distance && number < centroid)) distance = other, centroid = number;
    }
  };

  bool inside(const float* x) const {
    for (int d = 0; d < dims_; ++d) {
      if (!(x[d] >= header_.lowest[d] && x[d] <= header_.highest[d])) return false;
    }
    return true;
  }

  // Below 0 if another centroid may be nearer.
  int nearest_in_list(const float* x) const {
    const uint8_t* splits = index_ + kIndexHeaderBytes;
    int node = 0;
    for (int level = 0; level < header_.levels; ++level) {
      uint32_t bits;
      std::memcpy(&bits, splits + 4 * node, 4);
      float split;
      std::memcpy(&split, &bits, 4);
      const int dim = static_cast<int>(bits & 3);
      node = 2 * node + (x[dim < dims_ ? dim : 0] < split ? 1 : 2);
    }
    uint16_t start;
    std::memcpy(&start, index_ + shape_.second() + 2 * (node + 1 - (1 << header_.levels)), sizeof start);
    Nearest best;
    for (int chunk = start; chunk < shape_.most_chunks; ++chunk) {
      uint16_t entries[kChunkCentroids + 1];
      std::memcpy(entries, index_ + shape_.third() + int64_t{16} * chunk, sizeof entries);
      compare_chunk(x, entries, best);
      const uint32_t bits = (entries[kChunkCentroids] & 0x7fffu) << 16;
      float bound;
      std::memcpy(&bound, &bits, 4);
      if (best.distance < bound) return best.centroid / (2 * dims_);
      if ((entries[kChunkCentroids] & 0x8000u) != 0) break;
    }
    return -1;
  }

  // `best.centroid` is where the centroid begins in the book, in bytes.
  void compare_chunk(const float* x, const uint16_t* entries, Nearest& best) const {
    const int last = 2 * dims_ * (count_ - 1);
    const auto entry = [&](int i) {
      const int given = entries[i < kChunkCentroids ? i : kChunkCentroids - 1] & ~1;
      return given < last ? given : last;
    };
    const auto at = [&](int i) { return centroids_ + entry(i) / 2; };
#if defined(__AVX2__)
    if (dims_ == 4) return consider_eight(x, at, best.distance, [&](float distance, int i) { best.take(distance, entry(i)); });
#endif
    Nearest own;
    for (int i = 0; i < kChunkCentroids; ++i) {
      const float distance = distance_of(x, at(i));
      if (distance < own.distance) own = {distance, i};
    }
    if (own.centroid >= 0) best.take(own.distance, entry(own.centroid));
  }

  int nearest_in_boxes(const float* x) const {
    Nearest best;
    // The leaf of the nearer box at each level has a centroid that is near, if not the nearest.
    int near = 0;
    for (int level = 0; level < header_.levels; ++level) {
      const int first = 2 * near + 1;
      near = distance_of_box(x, first) <= distance_of_box(x, first + 1) ? first : first + 1;
    }
    scan(x, near + 1 - (1 << header_.levels), best);
    BoxWalk walk(header_.levels);
    while (!walk.done()) {
      if (certainly_further(distance_of_box(x, walk.node()), best.distance)) {
        walk.pass();
      } else if (walk.at_leaf()) {
        scan(x, walk.leaf, best);
        walk.pass();
      } else {
        walk.enter();
      }
    }
    return best.centroid;
  }

  float distance_of_box(const float* x, int node) const {
    const uint16_t* box = reinterpret_cast<const uint16_t*>(index_ + kIndexHeaderBytes) + 2 * node * dims_;
    float distance = 0;
    for (int d = 0; d < dims_; ++d) {
      const float below = half_to_float(box[d]) - x[d];
      const float above = x[d] - half_to_float(box[dims_ + d]);
      float away = below > above ? below : above;
      away = away < 0 ? 0 : away;
      distance += away * away;
    }
    return distance;
  }

  void scan(const float* x, int leaf, Nearest& best) const {
    const auto* numbers = reinterpret_cast<const uint16_t*>(index_ + shape_.second());
    const auto* ordered = reinterpret_cast<const uint16_t*>(index_ + shape_.third());
    const auto place = [&](int of_leaf) { return static_cast<int>(int64_t{count_} * of_leaf >> header_.levels); };
    for (int i = place(leaf); i < place(leaf + 1); ++i) {
      best.take(distance_of(x, ordered + int64_t{i} * dims_), numbers[i] < count_ ? numbers[i] : count_ - 1);
    }
  }

#if defined(__AVX2__)
  // Calls consider(distance, i) for those of eight centroids, at(0) to at(7), that are as near as `nearest`.
  template <class At, class Consider>
  static void consider_eight(const float* x, At&& at, float nearest, Consider&& consider) {
    const __m256 own = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(x));
    __m256 rows[4];  // the squares of two centroids each
    for (int i = 0; i < 4; ++i) {
      const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(2 * i)));
      const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at(2 * i + 1)));
      const __m256 away = _mm256_sub_ps(own, _mm256_cvtph_ps(_mm_unpacklo_epi64(first, second)));
      rows[i] = _mm256_mul_ps(away, away);
    }
    const __m256 a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpackhi_ps(rows[0], rows[1]);
    const __m256 c = _mm256_unpacklo_ps(rows[2], rows[3]), d = _mm256_unpackhi_ps(rows[2], rows[3]);
    // The first two of each four, and the last two.
    const __m256 half = _mm256_add_ps(_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xee));
    const __m256 more = _mm256_add_ps(half, _mm256_shuffle_ps(b, d, 0x44));
    const __m256 distances = _mm256_add_ps(more, _mm256_shuffle_ps(b, d, 0xee));
    const int near = _mm256_movemask_ps(_mm256_cmp_ps(distances, _mm256_set1_ps(nearest), _CMP_LE_OQ));
    if (near == 0) return;
    float each[8];
    _mm256_storeu_ps(each, distances);
    // Lane i has centroid 2 * i, and lane i + 4 the one behind it.
    for (int i = 0; i < 8; ++i) {
      if (near >> i & 1) consider(each[i], i % 4 * 2 + i / 4);
    }
  }
#endif

  int nearest_of_all(const float* x) const {
    Nearest best;
#if defined(__AVX2__)
    if (dims_ == 4) {
      for (int c = 0; c < count_; c += 8) {
        const auto number = [&](int i) { return c + i < count_ ? c + i : count_ - 1; };
        const auto at = [&](int i) { return centroids_ + int64_t{4} * number(i); };
        consider_eight(x, at, best.distance, [&](float distance, int i) { best.take(distance, number(i)); });
      }
      return best.centroid;
    }
#endif
    for (int c = 0; c < count_; ++c) best.take(distance_of(x, centroids_ + int64_t{c} * dims_), c);
    return best.centroid;
  }

  float distance_of(const float* x, const uint16_t* centroid) const {
    float distance = 0;
    for (int d = 0; d < dims_; ++d) {
      const float away = x[d] - half_to_float(centroid[d]);
      distance += away * away;
    }
    return distance;
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
  uint32_t spoilt[kSpoiltWords] = {};
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
          const int code = book.nearest(x);
          codes[octet][place] = static_cast<uint16_t>(code < 0 ? 0 : code);
          const int token = token_of(octet, place);
          if (code < 0) spoilt[token / 32] |= 1u << token % 32;
        }
      }
    }
    for (int octet = 0; octet < kChunkOctets; ++octet) chunk.write(octet * chunk.quads + quad, codes[octet]);
  }
  for (int word = 0; word < kSpoiltWords; ++word) {
    if (spoilt[word] != 0) __atomic_fetch_or(a.spoilt(a.to[copy]) + word, spoilt[word], __ATOMIC_RELAXED);
  }
}

}  // namespace

void encode_keys(const EncodeKeysArguments& a, Workers& workers) {
  const int chunks = coded_chunks(a.groups());
  for (int32_t copy = 0; copy < a.copies; ++copy) std::memset(a.spoilt(a.to[copy]), 0, kSpoiltWords * sizeof(uint32_t));
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
