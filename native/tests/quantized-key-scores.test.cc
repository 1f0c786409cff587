#include "kernels/quantized-key-scores/quantized-key-scores.h"

#include "tests/check.h"
#include "runtime/isa.h"
#include "tests/quantized-scores-case.h"

namespace kv {
namespace {

TEST("quantized-key-scores agrees with float64 on every instruction set, with the same bits on any number of threads") {
  std::mt19937 random(1);
  for (const int bits : {8, 4, 3, 2}) {
    for (const int head_dim : {1, 20, 64, 80, 128, 160, 512}) {
      ScoredSizes sizes;
      sizes.dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
      sizes.head_dim = head_dim;
      sizes.bits = bits;
      sizes.rotated = pick(random, 0, 2) > 0;
      sizes.group = pick(random, 1, 9);
      sizes.rows = pick(random, 1, 2);
      const QuantizedScoresCase wanted = QuantizedScoresCase::random(random, sizes);
      on_every_isa([&](Isa isa) {
        QuantizedScoresCase one = wanted, three = wanted;
        CHECK(one.run_on_cpu(isa, 1));
        CHECK(three.run_on_cpu(isa, 3));
        CHECK(one.wrong_scores(0) == 0);
        CHECK(std::memcmp(one.scores.data(), three.scores.data(), one.scores.size() * sizeof(float)) == 0);
      });
    }
  }
}

TEST("quantized-key-scores refuses formats that there are not") {
  std::mt19937 random(2);
  QuantizedScoresCase test = QuantizedScoresCase::random(random, {});
  Workers workers(1);
  ExecutionContext context{workers, best_isa()};
  QuantizedKeyScoresArguments arguments = test.arguments();
  arguments.key_bits = 5;
  CHECK(quantized_key_scores(arguments, context).code == StatusCode::capability);
}

}  // namespace
}  // namespace kv
