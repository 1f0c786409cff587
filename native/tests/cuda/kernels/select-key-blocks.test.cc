#include "kernels/select-key-blocks/select-key-blocks.h"

#include <cmath>
#include <random>
#include <vector>

#include "runtime/isa.h"
#include "runtime/workers.h"
#include "tests/check.h"
#include "tests/cuda/cuda-testing.h"
#include "tests/cuda/kernels/case-loop.h"
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
  std::vector<int32_t> tile_blocks;  // if any, of a budget

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
    here.tile_blocks = tile_blocks.empty() ? nullptr : tile_blocks.data();
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
    DeviceBuffer<int32_t> blocks(empty.blocks), counts(empty.counts), device_tile_blocks(tile_blocks);
    SelectKeyBlocksArguments there = a;
    const auto of = [](const Floats& values, const DeviceBuffer<float>& memory) { return values.empty() ? nullptr : memory.get(); };
    there.scores = of(scores, device_scores);
    there.slash = of(slash, device_slash);
    there.vertical = of(vertical, device_vertical);
    there.horizontal = of(horizontal, device_horizontal);
    there.tile_blocks = tile_blocks.empty() ? nullptr : device_tile_blocks.get();
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

template <class Draw>
Floats drawn(int64_t length, Draw&& draw) {
  Floats values(static_cast<size_t>(length));
  for (float& value : values) value = draw();
  values[values.size() / 2] = NAN;
  return values;
}

struct Rule {
  BlockRule rule;
  float threshold;
  double share;
};
const Rule kRules[] = {
    {BlockRule::threshold, 1.5f, 0},   {BlockRule::budget, 0, 1e-6},       {BlockRule::budget, 0, 0.05},
    {BlockRule::budget, 0, 0.5},       {BlockRule::budget, 0, 1},          {BlockRule::mass, 0, 1e-6},
    {BlockRule::mass, 0, 0.5},         {BlockRule::mass, 0, 0.9},          {BlockRule::mass, 0, 0.999999},
    {BlockRule::of_max, -0.5f, 0},     {BlockRule::of_max, -2, 0},
};

Selection of_rows(int rows, const Rule& rule) {
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
  a.capacity = 80;
  a.rule = rule.rule;
  a.threshold = rule.threshold;
  a.share = rule.share;
  return selection;
}

}  // namespace

TEST("select-key-blocks without an estimate takes only what is always taken, as the CPU") {
  for (const int rows : {1, 200, 5000}) {
    for (const int diagonal : {1, 100, 4000}) {
      Selection selection = of_rows(rows, kRules[0]);
      selection.a.diagonal_tokens = diagonal;
      selection.check_devices();
    }
  }
}

TEST("select-key-blocks by parts agrees with the CPU, to the last block") {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return normal(random); };
  for (const int rows : {1, 200, 5000}) {
    for (const Rule& rule : kRules) {
      if (rule.rule == BlockRule::mass || rule.rule == BlockRule::of_max) continue;
      Selection selection = of_rows(rows, rule);
      SelectKeyBlocksArguments& a = selection.a;
      selection.slash = drawn(int64_t{3} * a.tokens, draw);
      selection.vertical = drawn(int64_t{3} * a.tokens, draw);
      selection.horizontal = drawn(int64_t{3} * a.rows, draw);
      for (const int tile_rows : {64, 128, 192}) {
        a.tile_rows = tile_rows;
        selection.check_devices();
      }
    }
  }
}

TEST("select-key-blocks takes as many blocks a tile as another tile did, as the CPU") {
  std::mt19937 random(12);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return normal(random); };
  for (const int rows : {1, 200, 5000}) {
    for (const int count : {-1, 0, 4, 30, 1 << 30}) {
      Selection selection = of_rows(rows, {BlockRule::budget, 0, 1});
      SelectKeyBlocksArguments& a = selection.a;
      selection.tile_blocks = {count, -9, 2, -9, 6};
      a.tile_blocks_stride = 2;
      selection.slash = drawn(int64_t{3} * a.tokens, draw);
      selection.vertical = drawn(int64_t{3} * a.tokens, draw);
      selection.horizontal = drawn(int64_t{3} * a.rows, draw);
      selection.check_devices();
    }
  }
}

TEST("select-key-blocks by scores agrees with the CPU, to the last block, ties by lower index") {
  std::mt19937 random(10);
  std::normal_distribution<float> normal;
  // Few different scores are many ties.
  const auto any = [&] { return 4 * normal(random) - 8; };
  const auto few = [&] { const float score = std::round(normal(random)); return score < -1 ? -INFINITY : score; };
  const auto one = [] { return -3.0f; };
  for (const int rows : {1, 200, 5000}) {
    for (const Rule& rule : kRules) {
      Selection selection = of_rows(rows, rule);
      const int64_t count = selection.a.lists() * 79;
      for (const Floats& scores : {drawn(count, any), drawn(count, few), drawn(count, one)}) {
        selection.scores = scores;
        selection.check_devices();
      }
    }
  }
}

TEST("select-key-blocks of 131,072 tokens agrees with the CPU, to the last block") {
  if (only_small_cases()) return;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  const auto draw = [&] { return 2 * normal(random) - 6; };
  for (const int rows : {8192, 131072}) {
    for (const Rule& rule : {Rule{BlockRule::budget, 0, 0.03}, Rule{BlockRule::mass, 0, 0.95}}) {
      Selection selection = of_rows(rows, rule);
      SelectKeyBlocksArguments& a = selection.a;
      a.query_heads = 2;
      a.tokens = 131072;
      a.capacity = 2048;
      selection.scores = drawn(a.lists() * a.capacity, draw);
      selection.check_devices();
      if (rule.rule == BlockRule::mass) continue;
      selection.scores.clear();
      // Few different scores are many ties.
      const auto few = [&] { return std::round(draw()); };
      for (const bool ties : {false, true}) {
        selection.slash = ties ? drawn(int64_t{2} * a.tokens, few) : drawn(int64_t{2} * a.tokens, draw);
        selection.vertical = ties ? drawn(int64_t{2} * a.tokens, few) : drawn(int64_t{2} * a.tokens, draw);
        selection.horizontal = ties ? drawn(int64_t{2} * a.rows, few) : drawn(int64_t{2} * a.rows, draw);
        selection.check_devices();
      }
    }
  }
}
