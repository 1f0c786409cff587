// Keys in codes: every instruction set and thread count encodes and decodes alike, and scores what decoded keys give.
#include "tests/coded-case.h"

#include "tests/check.h"

namespace kv {

TEST("keys in codes are the same on every instruction set and thread count, and scores are those of decoded keys") {
  std::mt19937 random(7);
  for (int round = 0; round < 12; ++round) {
    CodedSizes sizes;
    sizes.dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
    sizes.sub_dim = pick_from(random, {1, 2, 2, 3, 4, 8});
    sizes.head_dim = sizes.sub_dim * pick_from(random, {1, 5, 16, 20, 32});
    sizes.centroids = pick_from(random, {2, 9, 100, 300});
    sizes.bits = sizes.centroids == 2 ? pick(random, 1, 16) : pick(random, 9, 16);
    sizes.separate = pick(random, 0, 3) == 0;
    sizes.scaled = pick(random, 0, 1) == 0;
    sizes.group = pick(random, 1, 9);
    sizes.rows = pick(random, 1, 2);
    const CodedCase drawn = CodedCase::random(random, sizes);
    CodedCase first = drawn;
    CHECK(first.run_on_cpu(Isa::baseline, 1));
    CHECK(first.wrong_scores(0.0) == 0 && first.wrong_ranges() == 0);
    on_every_isa([&](Isa isa) {
      CodedCase other = drawn;
      other.index_books(isa, 3);
      CHECK(other.index == drawn.index);
      CHECK(other.run_on_cpu(isa, 3));
      CHECK(other.codes == first.codes && other.decoded == first.decoded);
      CHECK(other.wrong_scores(0.0) == 0 && other.wrong_ranges() == 0);
    });
  }
}

TEST("every sub-vector's code is that of its nearest centroid, by an index as by comparing all") {
  std::mt19937 random(8);
  for (const int sub_dim : {1, 2, 3, 4, 8}) {
    CodedSizes sizes;
    sizes.head_dim = 32 * sub_dim;
    sizes.sub_dim = sub_dim;
    sizes.centroids = 2000;
    sizes.bits = 11;
    CodedCase indexed = CodedCase::random(random, sizes);
    CodedCase compared = indexed;
    // An index of zeros holds no sub-vector, and has other levels.
    std::fill(compared.index.begin(), compared.index.end(), 0);
    CHECK(indexed.run_on_cpu(best_isa(), 2) && compared.run_on_cpu(best_isa(), 2));
    CHECK(indexed.codes == compared.codes);
  }
}

}  // namespace kv
