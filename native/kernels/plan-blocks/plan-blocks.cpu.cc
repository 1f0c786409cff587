#include "kernels/plan-blocks/plan-blocks.h"

#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int32_t kLoading = -2;  // the place of what is to be loaded

// A kv head of a batch entry with a row.
struct List {
  const PlanBlocksArguments& a;
  int64_t cache_head;
  const int32_t* chosen;
  int32_t count;
  int32_t blocks;  // of the sequence

  List(const PlanBlocksArguments& given, int32_t entry, int32_t head)
      : a(given),
        cache_head(int64_t{a.slots[entry]} * a.kv_heads + head),
        chosen(a.chosen + cache_head * a.room),
        count(a.chosen_counts[cache_head]),
        blocks(static_cast<int32_t>((int64_t{a.key_counts[cache_head]} + a.block_tokens - 1) / a.block_tokens)) {}

  int32_t host_block(int32_t block) const { return a.block_table[cache_head * a.table_width + block]; }
  bool is_cached(int32_t block) const { return a.fixed_place(cache_head, block, blocks) < 0; }
};

template <class Body>
void for_each_list(const PlanBlocksArguments& a, Body body) {
  for (int32_t entry = 0; entry < a.batch; ++entry) {
    if (a.query_start[entry] == a.query_start[entry + 1]) continue;
    for (int32_t head = 0; head < a.kv_heads; ++head) body(List(a, entry, head));
  }
}

// Blocks that the last steps chose, of the lists that `history` keeps of them.
int32_t working_set(const int32_t* history, int32_t room, uint64_t* marks, int32_t width) {
  std::memset(marks, 0, static_cast<size_t>(width + 63) / 64 * sizeof(uint64_t));
  int32_t marked = 0;
  for (int32_t i = 0; i < kWorkingSetSteps * room; ++i) {
    const int32_t block = history[i];
    if (block < 0 || block >= width) continue;
    const uint64_t bit = uint64_t{1} << block % 64;
    if ((marks[block / 64] & bit) == 0) ++marked;
    marks[block / 64] |= bit;
  }
  return marked;
}

void count_demand(const List& list, uint64_t* marks) {
  const PlanBlocksArguments& a = list.a;
  BlockDemand& demand = a.demand[list.cache_head];
  int32_t* history = a.history + list.cache_head * kWorkingSetSteps * a.room;
  if (demand.steps <= 0) {
    std::memset(history, 0xff, sizeof(int32_t) * kWorkingSetSteps * static_cast<size_t>(a.room));
    demand = {};
  }
  int32_t* newest = history + demand.steps % kWorkingSetSteps * a.room;
  for (int32_t i = 0; i < a.room; ++i) {
    newest[i] = i < list.count && list.is_cached(list.chosen[i]) ? list.chosen[i] : -1;
    if (newest[i] < 0) continue;
    if (a.is_cached(a.where[list.host_block(newest[i])])) ++demand.hits;
    else ++demand.misses;
  }
  demand.steps += 1;
  demand.working_set = working_set(history, a.room, marks, a.table_width);
}

// When a place was last chosen; 0 if it holds nothing. Places of this step are newest of all.
uint32_t age_key(const PlanBlocksArguments& a, int32_t place) {
  const int32_t block = a.holds[place];
  if (block < 0 || block >= a.block_count || a.where[block] != a.first_cached + place) return 0;
  return static_cast<uint32_t>(a.used_at[place]);
}

// The places of `wanted` misses, in ascending order. `ages` has room for all places.
void find_victims(const PlanBlocksArguments& a, int32_t wanted, uint32_t* ages, int32_t* victims) {
  for (int32_t place = 0; place < a.cached; ++place) ages[place] = age_key(a, place);
  uint32_t order = 0;  // the largest age that leaves, found digit by digit
  int32_t below = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int32_t bins[256] = {};
    for (int32_t place = 0; place < a.cached; ++place) {
      if (shift == 24 || (ages[place] ^ order) >> (shift + 8) == 0) ++bins[ages[place] >> shift & 255];
    }
    uint32_t bin = 0;
    while (below + bins[bin] < wanted) below += bins[bin++];
    order |= bin << shift;
  }
  int32_t equal = wanted - below, found = 0;
  for (int32_t place = 0; place < a.cached; ++place) {
    if (ages[place] < order || (ages[place] == order && equal-- > 0)) victims[found++] = place;
  }
}

}  // namespace

void plan_blocks(const PlanBlocksArguments& a, Workers& workers) {
  const int32_t now = a.clock[0] + 1;
  workers.for_each(static_cast<size_t>(a.batch) * static_cast<size_t>(a.kv_heads), [&](size_t index, int worker) {
    const auto entry = static_cast<int32_t>(index) / a.kv_heads;
    if (a.query_start[entry] == a.query_start[entry + 1]) return;
    auto* marks = static_cast<uint64_t*>(workers.scratch(worker, static_cast<size_t>(a.table_width + 64) / 8 + sizeof(uint64_t)));
    count_demand(List(a, entry, static_cast<int32_t>(index) % a.kv_heads), marks);
  });
  // Loads in the order of the lists.
  int32_t loads = 0;
  for_each_list(a, [&](const List& list) {
    for (int32_t i = 0; i < list.count; ++i) {
      if (!list.is_cached(list.chosen[i])) continue;
      const int32_t block = list.host_block(list.chosen[i]);
      int32_t& place = a.where[block];
      if (a.is_cached(place)) a.used_at[place - a.first_cached] = now;
      else if (place != kLoading) {
        place = kLoading;
        a.loads[loads++] = block;
      }
    }
  });
  int32_t* places = a.loads + a.most_loads;
  if (loads > 0) find_victims(a, loads, static_cast<uint32_t*>(workers.shared_scratch(static_cast<size_t>(a.cached) * sizeof(uint32_t))), places);
  for (int32_t i = 0; i < loads; ++i) {
    const int32_t place = places[i];
    const int32_t former = a.holds[place];
    if (former >= 0 && former < a.block_count && a.where[former] == a.first_cached + place) a.where[former] = -1;
  }
  for (int32_t i = 0; i < loads; ++i) {
    a.holds[places[i]] = a.loads[i];
    a.used_at[places[i]] = now;
    places[i] += a.first_cached;
    a.where[a.loads[i]] = places[i];
  }
  a.load_count[0] = loads;
  a.clock[0] = now;
  for_each_list(a, [&](const List& list) {
    int32_t* read = a.read_table + list.cache_head * a.room;
    for (int32_t i = 0; i < list.count; ++i) {
      const int32_t fixed = a.fixed_place(list.cache_head, list.chosen[i], list.blocks);
      read[i] = fixed >= 0 ? fixed : a.where[list.host_block(list.chosen[i])];
    }
    a.read_counts[list.cache_head] = a.tokens_of(list.count, a.key_counts[list.cache_head], list.blocks);
  });
}

}  // namespace KV_ISA
}  // namespace kv
