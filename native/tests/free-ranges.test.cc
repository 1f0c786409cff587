#include "runtime/free-ranges.h"

#include <random>
#include <vector>

#include "tests/check.h"

using namespace kv;

TEST("what comes back to a range is taken again, whatever the order, and joins its neighbours") {
  FreeRanges ranges(100);
  CHECK(ranges.take(101) == std::nullopt);
  CHECK(ranges.take(30) == size_t{0} && ranges.take(30) == size_t{30} && ranges.take(40) == size_t{60});
  CHECK(ranges.take(1) == std::nullopt && ranges.available() == 0);
  ranges.give_back(0, 30);
  ranges.give_back(60, 40);
  CHECK(ranges.available() == 70 && ranges.take(50) == std::nullopt);
  ranges.give_back(30, 30);
  CHECK(ranges.take(100) == size_t{0});
  CHECK(FreeRanges(0).take(1) == std::nullopt);
}

TEST("parts of a range never overlap, and all come back to one") {
  constexpr size_t kSize = 1000;
  FreeRanges ranges(kSize);
  std::vector<int> owners(kSize, 0);
  struct Part {
    size_t offset;
    size_t size;
  };
  std::vector<Part> parts;
  std::mt19937 random(18);
  size_t taken = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const size_t size = 1 + random() % 60;
      const std::optional<size_t> offset = ranges.take(size);
      if (!offset.has_value()) continue;
      for (size_t i = *offset; i < *offset + size; ++i) CHECK(i < kSize && ++owners[i] == 1);
      parts.push_back({*offset, size});
      taken += size;
    } else if (!parts.empty()) {
      std::swap(parts[random() % parts.size()], parts.back());
      const auto [offset, size] = parts.back();
      parts.pop_back();
      for (size_t i = offset; i < offset + size; ++i) --owners[i];
      ranges.give_back(offset, size);
      taken -= size;
    }
    CHECK(ranges.available() == kSize - taken);
  }
  for (const Part& part : parts) ranges.give_back(part.offset, part.size);
  CHECK(ranges.take(kSize) == size_t{0});
}
