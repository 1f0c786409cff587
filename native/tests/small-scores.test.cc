#include "shared/scores/small-scores.h"

#include <cmath>
#include <random>
#include <vector>

#include "tests/check.h"

namespace kv {
namespace {

// What a score stands for, with its exponent apart.
double over(float score, int32_t unit) { return WideScore(score).over(unit); }

void check_order() {
  // Every exponent down to those of which several share a number, in ascending order.
  float before = 0;
  for (int32_t exponent = -3000; exponent <= 0; ++exponent) {
    for (const float sum : {1.0f, 1.25f, 1.5f, 1.75f}) {
      const float score = score_of(sum, exponent);
      CHECK(score > before);
      before = score;
      // The step from one small score to the next is exponent^2 / (126 * 2^23) of an exponent, which changes what it
      // stands for by no more than as much; f32 rounds the exponent.
      const double step = exponent < -126 ? exponent * exponent / (126 * 0x1p23) - exponent * 0x1p-23 : 0;
      CHECK(std::fabs(over(score, exponent) / static_cast<double>(sum) - 1) <= step);
    }
  }
  CHECK(score_of(0, -500) == 0);
  CHECK(score_of(1, -2000000000) > 0);
  CHECK(score_of(3, -7) == 0x3p-7f);
  CHECK(score_of(1, -126) == 0x1p-126f);
}

void check_sums() {
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    const int32_t unit = -80 - static_cast<int32_t>(random() % 1000);
    std::vector<float> scores(1 + random() % 40);
    double wanted = 0;
    double plain = 0;
    for (float& score : scores) {
      const bool none = random() % 8 == 0;
      score = none ? 0 : score_of(1.0f + static_cast<float>(random() % 1024) / 1024, unit - static_cast<int32_t>(random() % 40));
      wanted += over(score, unit);
      plain += static_cast<double>(score);
    }
    if (!is_small(plain)) continue;
    const int32_t count = static_cast<int32_t>(scores.size());
    const float mean = small_mean([&](int32_t i) { return scores[static_cast<size_t>(i)]; }, count, count, plain);
    const double step = unit * unit / (126 * 0x1p23) + 1100 * 0x1p-23;
    CHECK(std::fabs(over(mean, unit + 8) * 256 * count / wanted - 1) <= step);
  }
}

}  // namespace

TEST("small-scores are in order, and stand for what was written") { check_order(); }

TEST("small-scores are added up as what they stand for") { check_sums(); }

TEST("small-scores that cancel out are plain numbers") {
  const float scores[] = {1, -1, 0x1p-110f};
  CHECK(small_mean([&](int32_t i) { return scores[i]; }, 3, 1, 0x1p-110) == 0x1p-110f);
}

}  // namespace kv
