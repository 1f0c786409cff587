// The number of streams is found in bounded time, once in a process, and reaches everyone who asks.
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

bool is_known_number(int streams) {
  return std::find(std::begin(kMemoryStreams), std::end(kMemoryStreams), streams) != std::end(kMemoryStreams);
}

}  // namespace

TEST("the probe names a number of streams in bounded time") {
  on_every_isa([](Isa isa) {
    const std::clock_t start = std::clock();
    CHECK(is_known_number(probe_memory_streams(isa)));
    // 20 ms of passes; the rest is for sanitizers.
    CHECK(std::clock() - start < 5 * CLOCKS_PER_SEC);
  });
}

TEST("everyone who asks gets the number that was measured once") {
  std::promise<int> promises[10];
  for (std::promise<int>& each : promises) {
    when_memory_streams_known(best_isa(), [&each](int streams) { each.set_value(streams); });
  }
  const int first = promises[0].get_future().get();
  CHECK(is_known_number(first));
  for (size_t i = 1; i < std::size(promises); ++i) CHECK(promises[i].get_future().get() == first);
  int later = 0;
  when_memory_streams_known(best_isa(), [&](int streams) { later = streams; });
  CHECK(later == first);
}

TEST("a pool reads one stream until it is told another number") {
  Workers workers(2);
  CHECK(workers.memory_streams() == 1);
  workers.set_memory_streams(4);
  CHECK(workers.memory_streams() == 4);
}
