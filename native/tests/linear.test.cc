// Compares `linear` with a loop in double precision over random shapes, strides, types and thread
// counts, with every build that this processor runs.
#include <tuple>
#include <utility>

#include "shared/memory-streams/memory-streams.h"
#include "tests/linear-case.h"

namespace kv {
namespace {

void check(const Case& c, std::mt19937& random) {
  const Problem problem(c, random);
  const std::vector<Expectation> wanted = reference(problem);
  on_every_linear([&](const LinearBuild& build) {
    const Matrix output = problem.run(build, 1, 0, c.tokens);
    CHECK(near_reference(problem, wanted, output, build));
    CHECK(gaps_untouched(output));
    CHECK(same_rows(output, problem.run(build, 3, 0, c.tokens), 0, c.tokens));
    CHECK(independent_of_neighbours(problem, output, build));
  });
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

}  // namespace
}  // namespace kv

using namespace kv;

TEST("linear is near a double-precision loop, whatever the shape, strides, types, threads and neighbours") {
  std::mt19937 random(20240611);
  const size_t sizes[] = {1, 2, 7, 15, 16, 17, 31, 33, 64, 96, 127, 129, 320};
  const size_t tokens[] = {1, 2, 3, 5, 8, 9, 14, 15, 16, 17, 18, 28, 29, 43, 70};
  const auto any = [&](const auto& from) { return from[random() % (sizeof(from) / sizeof(from[0]))]; };
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  for (int i = 0; i < 400; ++i) {
    Case c;
    c.tokens = any(tokens);
    c.in = any(sizes);
    c.out = any(sizes);
    c.gap = random() % 4;
    c.dtype = one_in(4) ? any(kTypes) : DType::f32;
    c.weight_dtype = kTypes[i % 3];
    c.bias_dtype = any(kTypes);
    c.bias = one_in(2);
    c.accumulate = one_in(2);
    c.integers = one_in(3);
    check(c, random);
  }
}

TEST("linear of few rows gives the same bits, however it reads the weights") {
  std::mt19937 random(16);
  for (const size_t tokens : {1, 2, 3, 4, 5, 8, 16}) {
    for (const DType weight_dtype : kTypes) {
      for (const auto& [in, out] : {std::pair<size_t, size_t>{1, 1}, {31, 2}, {33, 7}, {96, 64}, {257, 301}, {4'129, 13}}) {
        const Problem problem({tokens, in, out, tokens % 3, DType::f32, weight_dtype, DType::f16, true, false, false}, random);
        on_every_linear([&](const LinearBuild& build) {
          const Matrix first = problem.run(build, 2, 0, tokens);
          for (const MemoryReading& reading : kMemoryReadings) {
            CHECK(same_rows(first, problem.run(build, 2, 0, tokens, reading), 0, tokens));
          }
        });
      }
    }
  }
}

TEST("linear takes a row that is longer than a first cache") {
  std::mt19937 random(23);
  for (const DType weight_dtype : kTypes) {
    check({1, 8'209, 61, 1, DType::f32, weight_dtype, DType::f32, true, false, false}, random);
  }
}

TEST("linear takes few rows that together are longer than a first cache") {
  std::mt19937 random(31);
  for (const DType weight_dtype : kTypes) {
    for (size_t tokens = 2; tokens <= 16; ++tokens) {
      check({tokens, 4'117, 37, 1, DType::f32, weight_dtype, DType::f32, true, true, false}, random);
    }
    check({16, 545, 600, 1, DType::f16, weight_dtype, DType::f32, false, false, false}, random);
  }
}

TEST("linear widens every 16-bit weight exactly") {
  constexpr size_t kPatterns = 1 << 16;
  std::mt19937 random(5);
  for (DType dtype : {DType::f16, DType::bf16}) {
    Problem problem({1, 1, kPatterns, 0, DType::f32, dtype, DType::f32, false, false, true}, random);
    problem.input.write(0, 1.0f);
    for (size_t bits = 0; bits < kPatterns; ++bits) {
      reinterpret_cast<uint16_t*>(problem.weight.bytes.data())[bits] = static_cast<uint16_t>(bits);
    }
    on_every_linear([&](const LinearBuild& build) {
      const Matrix output = problem.run(build, 1, 0, 1);
      size_t wrong = 0;
      for (size_t bits = 0; bits < kPatterns; ++bits) {
        const double given = output.at(0, bits), wanted = problem.weight.at(bits, 0);
        wrong += std::isnan(wanted) ? !std::isnan(given) : given != wanted;
      }
      CHECK(wrong == 0);
    });
  }
}

TEST("linear takes empty extents") {
  std::mt19937 random(7);
  const DType f32 = DType::f32;
  for (size_t tokens : {0, 3, 20}) {
    check({tokens, 8, 8, 0, f32, DType::f16, f32, true, true, false}, random);
    check({tokens, 0, 8, 0, f32, DType::f16, f32, true, true, false}, random);
    check({tokens, 8, 0, 0, f32, DType::f16, f32, true, true, false}, random);
  }
}

TEST("linear takes more rows than one pass over the weights") {
  std::mt19937 random(11);
  check({410, 8192, 3, 0, DType::f32, DType::bf16, DType::f32, false, false, true}, random);
  check({1030, 40, 37, 1, DType::f32, DType::bf16, DType::f32, true, true, false}, random);
}

TEST("linear keeps its bound when numbers cancel, and when they are huge, tiny or subnormal") {
  std::mt19937 random(13);
  const DType f32 = DType::f32;
  for (const DType weights : kTypes) {
    // Of f16, 2^-17 is subnormal already.
    const int tiny = weights == DType::f16 ? -17 : -70;
    for (const size_t in : {33, 96, 100}) {
      const Case plain = {40, in, 37, 1, f32, weights, f32, false, false, false};
      for (const auto& [input_exponent, weight_exponent] :
           std::vector<std::pair<int, int>>{{0, 0}, {110, 7}, {100, -17}, {-60, tiny}, {-140, 0}, {-140, 10}, {-148, -10}}) {
        for (const bool cancelling : {false, true}) {
          Case c = plain;
          c.input_exponent = input_exponent;
          c.weight_exponent = weight_exponent;
          c.cancelling = cancelling;
          check(c, random);
        }
      }
    }
  }
}

// Rows and outputs that no such number reaches are as they were.
TEST("linear shows infinities and NaN in the outputs that they reach, and in no other") {
  std::mt19937 random(17);
  for (const DType dtype : kTypes) {
    const Problem sound({40, 64, 40, 0, dtype, dtype, dtype, false, false, false}, random);
    Problem spoilt = sound;
    spoilt.input.write(3 * spoilt.input.stride + 5, NAN);
    spoilt.input.write(4 * spoilt.input.stride + 6, INFINITY);
    spoilt.weight.write(7 * spoilt.weight.stride + 8, -INFINITY);
    spoilt.weight.write(39 * spoilt.weight.stride + 63, NAN);
    on_every_linear([&](const LinearBuild& build) {
      const Matrix wanted = sound.run(build, 2, 0, 40), output = spoilt.run(build, 2, 0, 40);
      size_t wrong = 0;
      for (size_t row = 0; row < 40; ++row) {
        for (size_t out = 0; out < 40; ++out) {
          const bool reached = row == 3 || row == 4 || out == 7 || out == 39;
          wrong += reached ? std::isfinite(output.at(row, out)) : output.at(row, out) != wanted.at(row, out);
        }
      }
      CHECK(wrong == 0);
    });
  }
}

TEST("linear gives several layers of one input the bits of one call each") {
  std::mt19937 random(23);
  const DType f32 = DType::f32;
  for (const size_t tokens : {1, 7, 40}) {
    const Case first = {tokens, 70, 1030, 1, f32, DType::bf16, f32, true, true, false};
    std::vector<Problem> problems(4, Problem(first, random));
    const std::pair<size_t, DType> others[] = {{37, DType::bf16}, {0, DType::f16}, {1025, DType::f16}};
    for (size_t i = 0; i < 3; ++i) {
      Case c = first;
      std::tie(c.out, c.weight_dtype) = others[i];
      problems[i + 1] = Problem(c, random);
      problems[i + 1].input = problems[0].input;
    }
    on_every_linear([&](const LinearBuild& build) {
      for (const int threads : {1, 3}) {
        std::vector<Matrix> outputs;
        for (const Problem& problem : problems) outputs.push_back(problem.before);
        std::vector<LinearArguments> layers;
        for (size_t i = 0; i < 4; ++i) layers.push_back(problems[i].arguments(0, tokens, outputs[i]));
        Workers workers(threads);
        build.run({layers.data(), 4}, workers);
        for (size_t i = 0; i < 4; ++i) CHECK(same_rows(outputs[i], problems[i].run(build, 2, 0, tokens), 0, tokens));
      }
    });
  }
}

TEST("linear finds a weight that must be scaled behind many that need not") {
  std::mt19937 random(29);
  std::normal_distribution<float> normal;
  constexpr size_t kFeatures = 1100, kLate = 1090, kOut = 33;
  Problem problem({40, kFeatures, 70, 1, DType::f32, DType::bf16, DType::f32, false, false, false}, random);
  problem.input.fill([&] { return std::ldexp(normal(random), -10); });
  // A subnormal weight, of a feature that is large enough to show it.
  for (size_t row = 0; row < 40; ++row) problem.input.write(row * problem.input.stride + kLate, 0x1p120f);
  for (size_t out = 0; out < 70; ++out) problem.weight.write(out * problem.weight.stride + kLate, out == kOut ? 0x1p-130f : 0.0f);
  const std::vector<Expectation> wanted = reference(problem);
  on_every_linear([&](const LinearBuild& build) { CHECK(near_reference(problem, wanted, problem.run(build, 2, 0, 40), build)); });
}

#if defined(__x86_64__)
TEST("linear on the processor's tile registers has the bits that it has on emulated ones") {
  if (!runs(Isa::amx)) return;
  std::mt19937 random(19);
  for (const DType weights : {DType::f16, DType::bf16}) {
    const Problem problem({70, 129, 1025, 1, DType::f32, weights, DType::f32, true, true, false}, random);
    const Matrix wanted = problem.run(emulated_tiles(), 2, 0, 70);
    on_every_linear([&](const LinearBuild& build) {
      const Matrix output = problem.run(build, 2, 0, 70);
      CHECK(same_rows(output, wanted, 0, 70) == (build.name == "amx" || build.name == "emulated tiles"));
    });
  }
}
#endif
