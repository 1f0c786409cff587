#include "kernels/select-key-blocks/select-key-blocks.h"

#include <cmath>
#include <random>
#include <vector>

#include "runtime/isa.h"
#include "runtime/workers.h"
#include "tests/check.h"
#include "tests/cuda/cuda-testing.h"
#include "tests/cuda/kernels/device.cuda.h"

using namespace kv;
using namespace kv::tests;

namespace {

using Floats = std::vector<float>;

// Numbers of one estimate, and the lists that a device makes of it.
struct Selection {
  SelectKeyBlocksArguments a;
  Floats scores;
  Floats slash;
  Floats vertical;
  Floats horizontal;

  struct Lists {
    std::vector<int32_t> blocks;
    std::vector<int32_t> counts;
  };
  Lists room() const {
    const auto lists = static_cast<size_t>(a.lists());
    return {std::vector<int32_t>(lists * static_cast<size_t>(a.capacity), -1), std::vector<int32_t>(lists)};
  }

  Lists on_cpu() const {
    Lists lists = room();
    SelectKeyBlocksArguments here = a;
    const auto of = [](const Floats& values) { return values.empty() ? nullptr : values.data(); };
    here.scores = of(scores);
    here.slash = of(slash);
    here.vertical = of(vertical);
    here.horizontal = of(horizontal);
    here.key_blocks = lists.blocks.data();
    here.counts = lists.counts.data();
    Workers workers(2);
    ExecutionContext context{workers};
    context.isa = best_isa();
    CHECK(select_key_blocks(here, context).ok());
    return lists;
  }

  Lists on_gpu() const {
    const Lists empty = room();
    Stream stream(cuda_device());
    DeviceBuffer<float> device_scores(scores), device_slash(slash), device_vertical(vertical), device_horizontal(horizontal);
    DeviceBuffer<int32_t> blocks(empty.blocks), counts(empty.counts);
    SelectKeyBlocksArguments there = a;
    const auto of = [](const Floats& values, const DeviceBuffer<float>& memory) { return values.empty() ? nullptr : memory.get(); };
    there.scores = of(scores, device_scores);
    there.slash = of(slash, device_slash);
    there.vertical = of(vertical, device_vertical);
    there.horizontal = of(horizontal, device_horizontal);
    there.key_blocks = blocks.get();
    there.counts = counts.get();
    stream.enqueue({"selectKeyBlocks", {}, [there](ExecutionContext& context) { return select_key_blocks(there, context); }});
    CHECK(reached(stream).ok());
    return {blocks.host(), counts.host()};
  }

  void check_devices() const {
    const Lists wanted = on_cpu();
    const Lists given = on_gpu();
    CHECK(given.counts == wanted.counts);
    CHECK(given.blocks == wanted.blocks);
  }
};

Selection of_rows(int rows) {
  Selection selection;
  SelectKeyBlocksArguments& a = selection.a;
  a.query_heads = 3;
  a.tokens = 5000;
  a.rows = rows;
  a.tile_rows = 128;
  a.sink_tokens = 4;
  a.diagonal_tokens = 100;
  a.dense_rows = rows == 200 ? 3 : 0;
  a.bound = rows == 200 ? SlashBound::paper : SlashBound::safe;
  a.threshold = 1.5f;
  a.capacity = 80;
  return selection;
}

template <class Draw>
Floats drawn(int64_t length, Draw&& draw) {
  Floats values(static_cast<size_t>(length));
  for (float& value : values) value = draw();
  values[values.size() / 2] = NAN;
  return values;
}

const double kBudgets[] = {0.0, 1e-6, 0.05, 0.5, 1.0};

}  // namespace

TEST("key blocks are selected by parts on the GPU as on the CPU, to the last block") {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (const int rows : {1, 200, 5000}) {
    for (const double budget : kBudgets) {
      Selection selection = of_rows(rows);
      SelectKeyBlocksArguments& a = selection.a;
      a.by_budget = budget > 0;
      a.budget = budget;
      const auto draw = [&] { return normal(random); };
      selection.slash = drawn(int64_t{3} * a.tokens, draw);
      selection.vertical = drawn(int64_t{3} * a.tokens, draw);
      selection.horizontal = drawn(int64_t{3} * a.rows, draw);
      selection.check_devices();
    }
  }
}

TEST("key blocks are selected by scores on the GPU as on the CPU, to the last block, ties by lower index") {
  std::mt19937 random(10);
  std::normal_distribution<float> normal;
  for (const int rows : {1, 200, 5000}) {
    for (const double budget : kBudgets) {
      // Few different scores are many ties.
      for (const bool few : {false, true}) {
        Selection selection = of_rows(rows);
        SelectKeyBlocksArguments& a = selection.a;
        a.by_budget = budget > 0;
        a.budget = budget;
        const auto draw = [&] {
          const float score = normal(random);
          return !few ? score : score < -1 ? -INFINITY : std::round(score);
        };
        selection.scores = drawn(a.lists() * 79, draw);
        selection.check_devices();
      }
    }
  }
}
