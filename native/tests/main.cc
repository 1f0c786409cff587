// Runs every native test, or those whose name holds the argument; an exception that leaves a test fails it, and so does
// a test that takes too long.
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "tests/check.h"

#ifndef KV_TEST_SECONDS
#define KV_TEST_SECONDS 600
#endif

namespace {

// Ends the process, naming the test, unless it goes before the time is over: a thread that hangs cannot be ended alone.
class Watchdog {
 public:
  explicit Watchdog(const char* test) : thread_([this, test] { watch(test); }) {}
  ~Watchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

 private:
  void watch(const char* test) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (wake_.wait_for(lock, std::chrono::seconds(KV_TEST_SECONDS), [this] { return done_; })) return;
    std::printf("FAIL %s: not done after %d s\n", test, KV_TEST_SECONDS);
    std::fflush(stdout);
    std::_Exit(1);
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  bool done_ = false;
  std::thread thread_;
};

void run(const kv::tests::Test& test) {
  Watchdog watchdog(test.name);
  try {
    test.body();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: threw %s\n", test.name, error.what());
    ++kv::tests::failures;
  }
}

}  // namespace

int main(int count, char** arguments) {
  // Whoever reads a pipe sees how far it is.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  int passed = 0;
  int failed = 0;
  for (const kv::tests::Test& test : kv::tests::all()) {
    if (count > 1 && std::strstr(test.name, arguments[1]) == nullptr) continue;
    const int before = kv::tests::failures;
    std::printf("     %s\n", test.name);
    run(test);
    const bool holds = kv::tests::failures == before;
    ++(holds ? passed : failed);
    std::printf("%s %s\n", holds ? "ok  " : "FAIL", test.name);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
