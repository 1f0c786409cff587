#include "kernels/cross-entropy/cross-entropy.h"

#include <algorithm>
#include <cmath>

#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {
namespace {

double by_definition(const float* logits, int64_t vocabulary, int32_t target) {
  const double greatest = *std::max_element(logits, logits + vocabulary);
  double sum = 0;
  for (int64_t i = 0; i < vocabulary; ++i) sum += std::exp(logits[i] - greatest);
  return greatest + std::log(sum) - logits[target];
}

void check_random_rows(Isa isa) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    CrossEntropyArguments a;
    a.rows = pick(random, 1, 9);
    a.vocabulary = pick_from(random, {1, 3, 16, 33, 1000});
    a.row_stride = a.vocabulary + pick(random, 0, 5);
    // Rows end where the memory does, so that a sanitizer sees a read past the last one.
    std::vector<float> logits(static_cast<size_t>((a.rows - 1) * a.row_stride + a.vocabulary));
    std::normal_distribution<float> normal(0.0f, 8.0f);
    for (float& logit : logits) logit = normal(random);
    std::vector<int32_t> targets(static_cast<size_t>(a.rows));
    for (int32_t& target : targets) target = pick(random, 0, static_cast<int>(a.vocabulary) - 1);
    std::vector<float> output(static_cast<size_t>(a.rows), NAN);
    a.logits = logits.data();
    a.targets = targets.data();
    a.output = output.data();
    Workers workers(3);
    ExecutionContext context{workers, isa};
    CHECK(cross_entropy(a, context).ok());
    for (int64_t row = 0; row < a.rows; ++row) {
      const double wanted = by_definition(logits.data() + row * a.row_stride, a.vocabulary, targets[row]);
      // Logits reach 40: two roundings to f32 of such numbers, and up to 1,000 terms summed in f32.
      CHECK(std::abs(output[row] - wanted) < 2e-5);
    }
  }
}

}  // namespace

TEST("cross-entropy agrees with f64") {
  on_every_isa([](Isa isa) { check_random_rows(isa); });
}

}  // namespace kv
