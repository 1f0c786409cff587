#include "runtime/background.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "tests/check.h"

using namespace kv;

namespace {

constexpr auto kLong = std::chrono::milliseconds(30);

std::shared_ptr<int> slow_to_let_go(std::atomic<int>& gone) {
  return std::shared_ptr<int>(new int(1), [&gone](int* held) {
    std::this_thread::sleep_for(kLong);
    delete held;
    ++gone;
  });
}

// Work that begins to end when the process does.
std::atomic<bool> begun{false};
std::atomic<bool> exiting{false};
std::atomic<bool> ended{false};

// What is registered first is called last.
const int checked_last = std::atexit([] {
  if (!begun.load() || ended.load()) return;
  std::printf("FAIL a process ends behind what it lets go in the background\n");
  std::fflush(stdout);
  std::_Exit(1);
});

}  // namespace

TEST("what is let go in the background is waited for, and what that lets go") {
  std::atomic<int> gone{0};
  for (int i = 0; i < 8; ++i) let_go_in_background(slow_to_let_go(gone));
  run_in_background([&gone] { let_go_in_background(slow_to_let_go(gone)); });
  wait_for_background();
  CHECK(gone.load() == 9);
}

TEST("a process ends behind what it lets go in the background") {
  CHECK(checked_last == 0);
  wait_for_background();
  CHECK(std::atexit([] { exiting.store(true); }) == 0);
  begun.store(true);
  run_in_background([] {
    while (!exiting.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(kLong);
    ended.store(true);
  });
}
