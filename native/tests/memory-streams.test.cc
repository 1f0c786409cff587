// How memory is read fastest is found in bounded time, once in a process, and reaches everyone who asks.
#include "shared/memory-streams/memory-streams.h"

#include <algorithm>
#include <ctime>
#include <future>
#include <iterator>

#include "runtime/workers.h"
#include "tests/check.h"
#include "tests/kernel-testing.h"

using namespace kv;

namespace {

bool are_same(MemoryReading a, MemoryReading b) { return a.streams == b.streams && a.cache == b.cache && a.requests == b.requests; }

bool is_known(MemoryReading reading) {
  return std::any_of(std::begin(kMemoryReadings), std::end(kMemoryReadings),
                     [&](MemoryReading each) { return are_same(each, reading); });
}

}  // namespace

TEST("the probe names a way of reading in bounded time") {
  on_every_isa([](Isa isa) {
    const std::clock_t start = std::clock();
    CHECK(is_known(probe_memory_reading(isa)));
    // 20 ms of passes; the rest is for sanitizers.
    CHECK(std::clock() - start < 5 * CLOCKS_PER_SEC);
  });
}

TEST("everyone who asks gets what was measured once") {
  std::promise<MemoryReading> promises[10];
  for (std::promise<MemoryReading>& each : promises) {
    when_memory_reading_known(best_isa(), [&each](MemoryReading reading) { each.set_value(reading); });
  }
  const MemoryReading first = promises[0].get_future().get();
  CHECK(is_known(first));
  for (size_t i = 1; i < std::size(promises); ++i) CHECK(are_same(promises[i].get_future().get(), first));
  MemoryReading later{0, 0, 0};
  when_memory_reading_known(best_isa(), [&](MemoryReading reading) { later = reading; });
  CHECK(are_same(later, first));
}

TEST("a pool reads one stream until it is told another way") {
  Workers workers(2);
  CHECK(are_same(workers.memory_reading(), {1, 1, 1}));
  workers.set_memory_reading({1, 2, kMostRequests});
  CHECK(are_same(workers.memory_reading(), {1, 2, kMostRequests}));
}
