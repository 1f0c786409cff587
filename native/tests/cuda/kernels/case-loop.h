// How the cases of a kernel are run. Environment: KV_SEED repeats the random numbers of an earlier run, and
// KV_CASES=small leaves few and short cases, for compute-sanitizer.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/check.h"

namespace kv::tests {

using Random = std::mt19937;

inline bool only_small_cases() {
  const char* cases = std::getenv("KV_CASES");
  return cases != nullptr && std::strcmp(cases, "small") == 0;
}

inline unsigned seed() {
  static const unsigned seed = [] {
    const char* given = std::getenv("KV_SEED");
    const unsigned chosen =
        given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
    std::printf("     KV_SEED=%u\n", chosen);
    return chosen;
  }();
  return seed;
}

inline std::vector<int> shuffled(int count, Random& random) {
  std::vector<int> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

// Whether a case passed, and what its line says of it.
struct Outcome {
  bool passed = true;
  std::string detail;

  void expect(bool holds, const std::string& failure) {
    if (holds) return;
    passed = false;
    detail += (detail.empty() ? "" : "; ") + failure;
  }
};

// Calls `run(case, random)`, which returns an outcome, for every case, and prints a line for each. Every case has a
// `name`. Each test begins with the run's seed, so that it draws the same numbers when it runs alone.
template <class Case, class Run>
void run_cases(const std::vector<Case>& cases, Run run) {
  Random random(seed());
  for (const Case& test : cases) {
    Outcome outcome;
    try {
      outcome = run(test, random);
    } catch (const std::exception& error) {
      outcome.expect(false, error.what());
    }
    std::printf("%s %-72s %s\n", outcome.passed ? "pass" : "FAIL", test.name.c_str(), outcome.detail.c_str());
    check(outcome.passed, test.name.c_str(), __FILE__, __LINE__);
  }
}

}  // namespace kv::tests
