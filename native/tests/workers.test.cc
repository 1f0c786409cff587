#include "runtime/workers.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/check.h"

using kv::Workers;

TEST("a loop calls its body once for each index, on workers of the pool") {
  for (int threads : {1, 2, 3, 8}) {
    Workers workers(threads);
    CHECK(workers.count() == threads);
    for (size_t count : {0, 1, 2, 7, 64, 1001}) {
      std::vector<std::atomic<int>> calls(count);
      std::atomic<int> strangers{0};
      workers.for_each(count, [&](size_t index, int worker) {
        calls[index].fetch_add(1);
        if (worker < 0 || worker >= threads) strangers.fetch_add(1);
      });
      size_t once = 0;
      for (const std::atomic<int>& each : calls) once += each.load() == 1;
      CHECK(once == count);
      CHECK(strangers.load() == 0);
    }
  }
}

TEST("a pool of one runs on the caller's thread") {
  Workers workers(1);
  const std::thread::id caller = std::this_thread::get_id();
  bool elsewhere = false;
  workers.for_each(100, [&](size_t, int worker) {
    elsewhere = elsewhere || worker != 0 || std::this_thread::get_id() != caller;
  });
  CHECK(!elsewhere);
}

TEST("plain writes of the body are seen by the caller, and the caller's by the next loop") {
  Workers workers(4);
  std::vector<int64_t> values(257, 0);
  for (int64_t round = 0; round < 200; ++round) {
    workers.for_each(values.size(), [&](size_t index, int) { values[index] += static_cast<int64_t>(index); });
    values[0] += 1;
  }
  CHECK(values[0] == 200);
  for (size_t index = 1; index < values.size(); ++index) CHECK(values[index] == 200 * static_cast<int64_t>(index));
}

TEST("an exception of the body reaches the caller, ends the loop and leaves the pool usable") {
  for (int threads : {1, 4}) {
    Workers workers(threads);
    for (int round = 0; round < 50; ++round) {
      std::atomic<size_t> calls{0};
      std::string caught;
      try {
        workers.for_each(100000, [&](size_t index, int) {
          calls.fetch_add(1);
          if (index == 3) throw std::runtime_error("index 3");
        });
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
      CHECK(caught == "index 3");
      std::atomic<size_t> sum{0};
      workers.for_each(10, [&](size_t index, int) { sum.fetch_add(index); });
      CHECK(sum.load() == 45);
    }
  }
}

TEST("when every call throws, the caller gets one of the exceptions") {
  Workers workers(4);
  bool caught = false;
  try {
    workers.for_each(64, [](size_t, int) { throw std::runtime_error("each"); });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  CHECK(caught);
}

// A thread that wakes after its loop has ended must neither run that loop's body, whose captures are gone,
// nor be waited for.
TEST("threads that wake late do not touch a loop that has ended") {
  Workers workers(8);
  for (int round = 0; round < 3000; ++round) {
    const size_t count = 2 + static_cast<size_t>(round % 3);
    std::vector<size_t> written(count, SIZE_MAX);
    workers.for_each(count, [&](size_t index, int) { written[index] = index; });
    for (size_t index = 0; index < count; ++index) CHECK(written[index] == index);
    // Now and then long enough for every thread to fall asleep.
    if (round % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST("a pool may end at any moment between loops") {
  for (int round = 0; round < 100; ++round) {
    Workers workers(4);
    std::atomic<int> calls{0};
    if (round % 2 == 0) workers.for_each(3, [&](size_t, int) { calls.fetch_add(1); });
    CHECK(calls.load() == (round % 2 == 0 ? 3 : 0));
  }
}

TEST("scratch is aligned, private to its worker, kept, and accounted for") {
  Workers workers(3);
  CHECK(workers.scratch_bytes() == 0);
  auto* shared = static_cast<unsigned char*>(workers.shared_scratch(100));
  CHECK(workers.scratch_bytes() == 4096);
  CHECK(workers.shared_scratch(4096) == shared);
  shared[99] = 1;

  std::atomic<int> torn{0};
  workers.for_each(300, [&](size_t index, int worker) {
    auto* mine = static_cast<uint32_t*>(workers.scratch(worker, 64 * sizeof(uint32_t)));
    if (reinterpret_cast<uintptr_t>(mine) % 64 != 0) torn.fetch_add(1);
    for (int i = 0; i < 64; ++i) mine[i] = static_cast<uint32_t>(index);
    for (int i = 0; i < 64; ++i) {
      if (mine[i] != index) torn.fetch_add(1);
    }
  });
  CHECK(torn.load() == 0);
  CHECK(shared[99] == 1);

  workers.shared_scratch(4097);
  CHECK(workers.scratch_bytes() >= 2 * 4096);
  CHECK(workers.scratch_bytes() % 4096 == 0);
}

TEST("a ring gives memory in turns, of several calls like the largest, and bounded") {
  Workers workers(2);
  const auto begin = [&](size_t bytes) { return reinterpret_cast<uintptr_t>(workers.shared_ring(bytes)); };
  const uintptr_t first = begin(5000);
  CHECK(first % 64 == 0);
  CHECK(workers.scratch_bytes() == 8 * 8192);
  for (uintptr_t call = 1; call < 8; ++call) CHECK(begin(5000) == first + call * 8192);
  CHECK(begin(5000) == first);
  CHECK(begin(100) == first + 8192);
  for (uintptr_t call = 0; call < 6; ++call) CHECK(begin(8192) == first + 3 * 4096 + call * 8192);
  // What is left is too short.
  CHECK(begin(8192) == first);

  const uintptr_t larger = begin(9 * 8192);
  CHECK(begin(9 * 8192) == larger + 9 * 8192);
  constexpr size_t kMost = size_t{64} << 20;
  begin(kMost / 2);
  CHECK(workers.scratch_bytes() == kMost);
  begin(kMost + 1);
  CHECK(workers.scratch_bytes() == kMost + 4096);
  Workers alone(1);
  CHECK(alone.shared_ring(100) == alone.shared_ring(100));
}
