#include "kernels/train-codebook/train-codebook.h"

#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"
#include "shared/random/philox.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int kBatchPiece = 256;     // vectors of a batch that one worker takes at a time
constexpr int kSampleBlock = 1024;   // vectors of a k-means++ sample that share a sum
constexpr float kInfinity = __builtin_inff();

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// What one codebook is trained with: all its memory is of one allocation.
struct Book {
  int32_t kv_head = 0;
  int32_t book = 0;
  float* means = nullptr;       // [centroid, sub_dim]
  int32_t* counts = nullptr;    // [centroid]
  float* columns = nullptr;     // [sub_dim, centroid]: the means, one dim after the other, filled up with infinity
  float* batch = nullptr;       // [vector, sub_dim]
  float* distances = nullptr;   // [vector], to the nearest centroid
  int32_t* nearest = nullptr;   // [vector]
};

class Training {
 public:
  Training(const TrainCodebookArguments& a, Workers& workers)
      : a_(a),
        workers_(workers),
        sub_dim_(a.head_dim / a.groups),
        shared_groups_(a.groups / a.books),
        vectors_(a.tokens * (a.groups / a.books)),
        padded_centroids_(round_up(a.centroids, kLanes)),
        books_(a.kv_heads * a.books),
        memory_(static_cast<char*>(workers.shared_scratch(static_cast<size_t>(books_ * bytes_of_book())))) {}

  void run() {
    if (a_.first_iteration == 0) {
      for_each(a_.kv_heads, [&](int64_t kv_head, int) { write_scale(static_cast<int32_t>(kv_head)); });
      if (find_bad_key()) return;
      for_each(books_, [&](int64_t index, int worker) { begin(book(index), worker); });
    }
    for_each(books_, [&](int64_t index, int) { write_columns(book(index)); });
    const int64_t pieces = (a_.batch_vectors + kBatchPiece - 1) / kBatchPiece;
    for (int32_t i = a_.first_iteration; i < a_.first_iteration + a_.iterations; ++i) {
      for_each(books_ * pieces, [&](int64_t index, int) { assign_piece(book(index / pieces), i, index % pieces); });
      for_each(books_, [&](int64_t index, int worker) { update(book(index), i, worker); });
    }
    for_each(books_, [&](int64_t index, int) { write_rounded(book(index)); });
  }

 private:
  template <class Body>
  void for_each(int64_t count, Body&& body) {
    workers_.for_each(static_cast<size_t>(count),
                      [&](size_t index, int worker) { body(static_cast<int64_t>(index), worker); });
  }

  int64_t bytes_of_book() const {
    const int64_t columns = padded_centroids_ * sub_dim_;
    const int64_t batch = int64_t{a_.batch_vectors} * (sub_dim_ + 2);
    return round_up((columns + batch) * int64_t{sizeof(float)}, 64);
  }

  Book book(int64_t index) const {
    Book b;
    b.kv_head = static_cast<int32_t>(index / a_.books);
    b.book = static_cast<int32_t>(index % a_.books);
    b.means = a_.means + index * a_.centroids * sub_dim_;
    b.counts = a_.counts + index * a_.centroids;
    b.columns = reinterpret_cast<float*>(memory_ + index * bytes_of_book());
    b.batch = b.columns + padded_centroids_ * sub_dim_;
    b.distances = b.batch + int64_t{a_.batch_vectors} * sub_dim_;
    b.nearest = reinterpret_cast<int32_t*>(b.distances + a_.batch_vectors);
    return b;
  }

  // Calls body with the key of a token as its elements' type.
  template <class Body>
  void with_key(int32_t kv_head, int64_t token, Body&& body) const {
    with_float_type(a_.dtype, [&](auto element) {
      const auto* keys = static_cast<const decltype(element)*>(a_.keys);
      body(keys + kv_head * a_.head_stride + token * a_.token_stride);
    });
  }

  // Vector `index` of a book, divided by its channels' scales.
  void load_vector(const Book& b, int64_t index, float* vector, int64_t stride) const {
    const int64_t group = b.book + index % shared_groups_;
    const float* scale = a_.scale + int64_t{b.kv_head} * a_.head_dim + group * sub_dim_;
    with_key(b.kv_head, index / shared_groups_, [&](const auto* key) {
      for (int i = 0; i < sub_dim_; ++i) vector[i * stride] = to_float(key[group * sub_dim_ + i]) / scale[i];
    });
  }

  // A number of the book's own that no other draw has.
  double draw(const Book& b, uint64_t step) const {
    const uint64_t book = static_cast<uint64_t>(b.kv_head) * static_cast<uint64_t>(a_.books) + static_cast<uint64_t>(b.book);
    return uniform_of(a_.seed, book << 40 | step);
  }

  int64_t index_below(double uniform, int64_t count) const {
    const auto index = static_cast<int64_t>(uniform * static_cast<double>(count));
    return index < count ? index : count - 1;
  }

  void write_scale(int32_t kv_head) const {
    float* scale = a_.scale + int64_t{kv_head} * a_.head_dim;
    double squares[512] = {};
    for (int64_t token = 0; token < a_.tokens; ++token) {
      with_key(kv_head, token, [&](const auto* key) {
        for (int dim = 0; dim < a_.head_dim; ++dim) {
          const double x = to_float(key[dim]);
          squares[dim] += x * x;
        }
      });
    }
    for (int dim = 0; dim < a_.head_dim; ++dim) {
      const double mean = squares[dim] / static_cast<double>(a_.tokens);
      // NaN where a key is not finite. A channel that is always 0 has the scale 1.
      const bool usable = mean > 0x1p-60 || !(mean >= 0);
      scale[dim] = usable && (a_.channel_scale || !(mean < kInfinity)) ? static_cast<float>(__builtin_sqrt(mean)) : 1.0f;
    }
  }

  bool find_bad_key() const {
    for (int32_t kv_head = 0; kv_head < a_.kv_heads; ++kv_head) {
      const float* scale = a_.scale + int64_t{kv_head} * a_.head_dim;
      bool good = true;
      for (int dim = 0; dim < a_.head_dim; ++dim) good = good && scale[dim] < kInfinity;
      if (good) continue;
      for (int64_t token = 0; token < a_.tokens; ++token) {
        with_key(kv_head, token, [&](const auto* key) {
          for (int dim = 0; dim < a_.head_dim; ++dim) {
            if (__builtin_isfinite(to_float(key[dim])) || *a_.bad_head >= 0) continue;
            *a_.bad_head = kv_head;
            *a_.bad_token = token;
          }
        });
        if (*a_.bad_head >= 0) return true;
      }
    }
    return false;
  }

  // k-means++ on a sample: each next centroid is a vector, chosen with a probability in proportion to its squared
  // distance to the nearest centroid that is there.
  void begin(const Book& b, int worker) {
    const int64_t wanted = a_.centroids * int64_t{4} > kLeastSample ? a_.centroids * int64_t{4} : kLeastSample;
    const int64_t sample = vectors_ < wanted ? vectors_ : wanted;
    const int64_t padded = round_up(sample, kSampleBlock);
    const int64_t blocks = padded / kSampleBlock;
    const auto floats = static_cast<size_t>(padded * (sub_dim_ + 1));
    auto* columns = static_cast<float*>(workers_.scratch(worker, floats * sizeof(float) + static_cast<size_t>(blocks) * sizeof(double)));
    float* distances = columns + padded * sub_dim_;
    auto* sums = reinterpret_cast<double*>(distances + padded);
    for (int64_t i = 0; i < padded; ++i) {
      // One of each stretch of the vectors, so that none is taken twice.
      const int64_t first = i * vectors_ / sample;
      const int64_t end = (i + 1) * vectors_ / sample;
      if (i < sample) load_vector(b, first + index_below(draw(b, static_cast<uint64_t>(i)), end - first), columns + i, padded);
      else for (int dim = 0; dim < sub_dim_; ++dim) columns[dim * padded + i] = 0;
      distances[i] = i < sample ? kInfinity : 0;
    }
    int64_t chosen = index_below(draw(b, static_cast<uint64_t>(sample)), sample);
    for (int32_t centroid = 0; centroid < a_.centroids; ++centroid) {
      float* mean = b.means + int64_t{centroid} * sub_dim_;
      for (int dim = 0; dim < sub_dim_; ++dim) mean[dim] = columns[dim * padded + chosen];
      b.counts[centroid] = 0;
      double total = 0;
      for (int64_t block = 0; block < blocks; ++block) {
        sums[block] = approach(columns + block * kSampleBlock, padded, mean, distances + block * kSampleBlock);
        total += sums[block];
      }
      const double uniform = draw(b, static_cast<uint64_t>(sample + 1 + centroid));
      chosen = total > 0 ? vector_at(uniform * total, sums, distances, sample) : index_below(uniform, sample);
    }
  }

  // Shortens the distances of a block of vectors to those to `mean`, where it is nearer. Returns their sum.
  double approach(const float* columns, int64_t stride, const float* mean, float* distances) const {
    Vec sum = {};
    for (int i = 0; i < kSampleBlock; i += kLanes) {
      Vec distance = {};
      for (int dim = 0; dim < sub_dim_; ++dim) {
        const Vec difference = load(columns + dim * stride + i) - mean[dim];
        distance += difference * difference;
      }
      const Vec before = load(distances + i);
      distance = distance < before ? distance : before;
      store(distances + i, distance);
      sum += distance;
    }
    return horizontal_sum(sum);
  }

  // The vector that the given share of all distances falls on; never one whose distance is 0.
  int64_t vector_at(double share, const double* sums, const float* distances, int64_t sample) const {
    int64_t last = 0;
    for (int64_t first = 0; first < sample; first += kSampleBlock) {
      const double sum = sums[first / kSampleBlock];
      if (share >= sum) {
        share -= sum;
      } else {
        const int64_t end = first + kSampleBlock < sample ? first + kSampleBlock : sample;
        for (int64_t i = first; i < end; ++i) {
          if (distances[i] > 0) last = i;
          share -= distances[i];
          if (distances[i] > 0 && share < 0) return i;
        }
      }
    }
    // What rounding left over.
    for (int64_t i = sample - 1; i > last; --i) {
      if (distances[i] > 0) return i;
    }
    return last;
  }

  static constexpr int64_t kLeastSample = 32768;

  void write_columns(const Book& b) const {
    for (int dim = 0; dim < sub_dim_; ++dim) {
      float* column = b.columns + dim * padded_centroids_;
      for (int32_t c = 0; c < a_.centroids; ++c) column[c] = b.means[int64_t{c} * sub_dim_ + dim];
      for (int64_t c = a_.centroids; c < padded_centroids_; ++c) column[c] = kInfinity;
    }
  }

  void assign_piece(const Book& b, int32_t iteration, int64_t piece) const {
    const int64_t first = piece * kBatchPiece;
    const int64_t end = first + kBatchPiece < a_.batch_vectors ? first + kBatchPiece : a_.batch_vectors;
    for (int64_t i = first; i < end; ++i) {
      const uint64_t step = (uint64_t{1} << 39) + static_cast<uint64_t>(iteration) * static_cast<uint64_t>(a_.batch_vectors);
      load_vector(b, index_below(draw(b, step + static_cast<uint64_t>(i)), vectors_), b.batch + i * sub_dim_, 1);
    }
    switch (sub_dim_) {
      case 2:
        return assign<2, 4>(b, first, end);
      case 4:
        return assign<4, 4>(b, first, end);
      case 8:
        return assign<8, 2>(b, first, end);
      default:
        return assign<0, 1>(b, first, end);
    }
  }

  // `rows` vectors at a time, so that a centroid is loaded once for all of them. sub_dim 0 stands for any.
  template <int sub_dim, int rows>
  void assign(const Book& b, int64_t first, int64_t end) const {
    for (; first + rows <= end; first += rows) nearest_centroids<sub_dim, rows>(b, first);
    for (; first < end; ++first) nearest_centroids<sub_dim, 1>(b, first);
  }

  template <int sub_dim, int rows>
  void nearest_centroids(const Book& b, int64_t first) const {
    const int dims = sub_dim == 0 ? sub_dim_ : sub_dim;
    const float* vectors = b.batch + first * dims;
    Vec least[rows];
    VecInt nearest[rows];
    VecInt index = {};
    for (int lane = 0; lane < kLanes; ++lane) index[lane] = lane;
    for (int row = 0; row < rows; ++row) {
      least[row] = splat(kInfinity);
      nearest[row] = VecInt{};
    }
    for (int64_t c = 0; c < padded_centroids_; c += kLanes) {
      Vec distance[rows] = {};
      for (int dim = 0; dim < dims; ++dim) {
        const Vec mean = load(b.columns + dim * padded_centroids_ + c);
        for (int row = 0; row < rows; ++row) {
          const Vec difference = mean - vectors[row * dims + dim];
          distance[row] += difference * difference;
        }
      }
      for (int row = 0; row < rows; ++row) {
        const VecInt nearer = distance[row] < least[row];
        least[row] = nearer ? distance[row] : least[row];
        nearest[row] = nearer ? index : nearest[row];
      }
      index += kLanes;
    }
    for (int row = 0; row < rows; ++row) {
      int best = 0;
      for (int lane = 1; lane < kLanes; ++lane) {
        const bool nearer = least[row][lane] < least[row][best] ||
                            (least[row][lane] == least[row][best] && nearest[row][lane] < nearest[row][best]);
        if (nearer) best = lane;
      }
      b.distances[first + row] = least[row][best];
      b.nearest[first + row] = nearest[row][best];
    }
  }

  void update(const Book& b, int32_t iteration, int worker) {
    const auto numbers = static_cast<size_t>(a_.centroids) * static_cast<size_t>(sub_dim_);
    auto* sums = static_cast<double*>(workers_.scratch(worker, numbers * sizeof(double) + static_cast<size_t>(a_.centroids) * sizeof(int32_t)));
    auto* counts = reinterpret_cast<int32_t*>(sums + numbers);
    std::memset(sums, 0, numbers * sizeof(double) + static_cast<size_t>(a_.centroids) * sizeof(int32_t));
    for (int64_t i = 0; i < a_.batch_vectors; ++i) {
      const int64_t c = b.nearest[i];
      ++counts[c];
      for (int dim = 0; dim < sub_dim_; ++dim) sums[c * sub_dim_ + dim] += static_cast<double>(b.batch[i * sub_dim_ + dim]);
    }
    for (int64_t c = 0; c < a_.centroids; ++c) {
      if (counts[c] == 0) continue;
      const double before = b.counts[c];
      b.counts[c] += counts[c];
      for (int dim = 0; dim < sub_dim_; ++dim) {
        float& mean = b.means[c * sub_dim_ + dim];
        mean = static_cast<float>((before * static_cast<double>(mean) + sums[c * sub_dim_ + dim]) / b.counts[c]);
      }
    }
    // After so many batches each centroid that is near to anything has had a vector.
    const int32_t interval = (8 * a_.centroids + a_.batch_vectors - 1) / a_.batch_vectors;
    if ((iteration + 1) % interval == 0) move_unused(b);
    write_columns(b);
  }

  void move_unused(const Book& b) const {
    for (int64_t c = 0; c < a_.centroids; ++c) {
      if (b.counts[c] > 0) continue;
      int64_t farthest = 0;
      for (int64_t i = 1; i < a_.batch_vectors; ++i) {
        if (b.distances[i] > b.distances[farthest]) farthest = i;
      }
      if (!(b.distances[farthest] > 0)) return;
      b.distances[farthest] = 0;
      for (int dim = 0; dim < sub_dim_; ++dim) b.means[c * sub_dim_ + dim] = b.batch[farthest * sub_dim_ + dim];
    }
  }

  void write_rounded(const Book& b) const {
    const int64_t first = b.means - a_.means;
    for (int64_t i = 0; i < int64_t{a_.centroids} * sub_dim_; ++i) {
      const float mean = b.means[i];
      a_.rounded[first + i] = float_to_half(mean > 65504.0f ? 65504.0f : mean < -65504.0f ? -65504.0f : mean);
    }
  }

  const TrainCodebookArguments& a_;
  Workers& workers_;
  const int sub_dim_;
  const int64_t shared_groups_;  // groups that share a book
  const int64_t vectors_;        // of a book
  const int64_t padded_centroids_;
  const int64_t books_;
  char* const memory_;
};

}  // namespace

void train_codebook(const TrainCodebookArguments& a, Workers& workers) { Training(a, workers).run(); }

}  // namespace KV_ISA
}  // namespace kv
