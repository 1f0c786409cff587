#include "kernels/train-codebook/train-codebook.h"

#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {
namespace {

struct Case {
  int kv_heads, tokens, head_dim, groups, books, centroids, batch_vectors;
  DType dtype;
};

Case random_case(std::mt19937& random) {
  Case c;
  c.kv_heads = pick(random, 1, 3);
  c.groups = pick(random, 1, 6);
  c.head_dim = c.groups * pick_from(random, {1, 2, 3, 4, 8, 16});
  c.books = pick_from(random, {1, c.groups});
  c.tokens = pick_from(random, {1, 2, 700});
  c.centroids = pick_from(random, {2, 15, 16, 17, 90});
  c.batch_vectors = pick_from(random, {1, 255, 256, 257, 1000});
  c.dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
  return c;
}

struct Books {
  std::vector<float> scale, means;
  std::vector<uint16_t> rounded;
  std::vector<int32_t> counts;
};

Books train(const Case& c, const std::vector<uint8_t>& keys, int threads, Isa isa) {
  const auto numbers = static_cast<size_t>(c.kv_heads * c.books * c.centroids * (c.head_dim / c.groups));
  const auto size = [](int count) { return static_cast<size_t>(count); };
  Books books{std::vector<float>(size(c.kv_heads * c.head_dim)), std::vector<float>(numbers),
              std::vector<uint16_t>(numbers), std::vector<int32_t>(size(c.kv_heads * c.books * c.centroids))};
  TrainCodebookArguments a;
  a.keys = keys.data();
  a.dtype = c.dtype;
  a.head_stride = int64_t{c.tokens} * c.head_dim;
  a.token_stride = c.head_dim;
  a.tokens = c.tokens;
  a.kv_heads = c.kv_heads;
  a.head_dim = c.head_dim;
  a.groups = c.groups;
  a.books = c.books;
  a.centroids = c.centroids;
  a.scale = books.scale.data();
  a.means = books.means.data();
  a.rounded = books.rounded.data();
  a.counts = books.counts.data();
  a.channel_scale = c.tokens % 2 == 0;
  a.seed = 5;
  a.batch_vectors = c.batch_vectors;
  a.iterations = 3;
  Workers workers(threads);
  ExecutionContext context{workers, isa};
  CHECK(train_codebook(a, context).ok());
  return books;
}

TEST("train-codebook gives the same bits for any number of threads, and counts every vector") {
  for (unsigned seed = 0; seed < 25; ++seed) {
    on_every_isa([&](Isa isa) {
      std::mt19937 random(seed);
      const Case c = random_case(random);
      const int elements = c.kv_heads * c.tokens * c.head_dim;
      std::vector<uint8_t> keys(static_cast<size_t>(elements) * byte_size(c.dtype));
      std::normal_distribution<float> normal;
      for (int i = 0; i < elements; ++i) write_element(c.dtype, keys, i, normal(random));
      const Books one = train(c, keys, 1, isa);
      const Books many = train(c, keys, 5, isa);
      CHECK(one.scale == many.scale);
      CHECK(one.means == many.means);
      CHECK(one.rounded == many.rounded);
      CHECK(one.counts == many.counts);
      for (int book = 0; book < c.kv_heads * c.books; ++book) {
        int64_t counted = 0;
        for (int i = 0; i < c.centroids; ++i) counted += one.counts[static_cast<size_t>(book * c.centroids + i)];
        CHECK(counted == int64_t{3} * c.batch_vectors);
      }
    });
  }
}

}  // namespace
}  // namespace kv
