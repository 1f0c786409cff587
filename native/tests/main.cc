// Runs every native test; an exception that leaves a test fails it.
#include <cstdio>
#include <exception>

#include "tests/check.h"

int main() {
  int passed = 0;
  int failed = 0;
  for (const kv::tests::Test& test : kv::tests::all()) {
    const int before = kv::tests::failures;
    try {
      test.body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: threw %s\n", test.name, error.what());
      ++kv::tests::failures;
    }
    const bool holds = kv::tests::failures == before;
    ++(holds ? passed : failed);
    std::printf("%s %s\n", holds ? "ok  " : "FAIL", test.name);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
