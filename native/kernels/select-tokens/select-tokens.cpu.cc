#include "kernels/select-tokens/select-tokens.h"

#include "shared/cpu/simd.cpu.h"
#include "shared/scores/small-scores.h"

namespace kv {
namespace KV_ISA {
namespace {

// Takes arrays from one allocation.
class Arena {
 public:
  explicit Arena(void* memory) : next_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int32_t count) {
    T* taken = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    return taken;
  }

  template <class T>
  static size_t bytes(int32_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + 15) / 16 * 16;
  }

 private:
  char* next_;
};

constexpr int kDigits = 3;
constexpr int kDigitBits = 11;
constexpr uint32_t kBuckets = 1u << kDigitBits;

// The memory of one row. Every array has one element for each token, which is enough for blocks too.
struct Scratch {
  float* pooled;
  float* block_scores;
  uint8_t* kept;         // of tokens
  uint8_t* taken;        // of blocks
  uint8_t* round_taken;  // of blocks
  int32_t* group_room;   // blocks that each group may still take; groups are never more than blocks
  int32_t* order;
  int32_t* other_order;
  uint32_t* keys;
  uint32_t* other_keys;
  uint32_t* buckets;

  static size_t bytes(int32_t tokens) {
    return 2 * Arena::bytes<float>(tokens) + 3 * Arena::bytes<uint8_t>(tokens) +
           3 * Arena::bytes<int32_t>(tokens) + 2 * Arena::bytes<uint32_t>(tokens) +
           Arena::bytes<uint32_t>(kDigits * kBuckets);
  }

  Scratch(Arena arena, int32_t tokens) {
    pooled = arena.take<float>(tokens);
    block_scores = arena.take<float>(tokens);
    kept = arena.take<uint8_t>(tokens);
    taken = arena.take<uint8_t>(tokens);
    round_taken = arena.take<uint8_t>(tokens);
    group_room = arena.take<int32_t>(tokens);
    order = arena.take<int32_t>(tokens);
    other_order = arena.take<int32_t>(tokens);
    keys = arena.take<uint32_t>(tokens);
    other_keys = arena.take<uint32_t>(tokens);
    buckets = arena.take<uint32_t>(kDigits * kBuckets);
  }
};

// An unsigned number that is smaller for a better score.
uint32_t key_of(float score) {
  const float number = score == score ? score + 0.0f : -__builtin_inff();  // adding zero turns -0 into +0
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return ~ascending;
}

// The indices of scores, best first. It is a radix sort, which is stable, so of equal scores the lower index comes
// first.
const int32_t* sort(const float* scores, int32_t count, const Scratch& scratch) {
  const auto digit_of = [](uint32_t key, int digit) {
    return (key >> (digit * kDigitBits)) & (kBuckets - 1);
  };
  std::memset(scratch.buckets, 0, sizeof(uint32_t) * kDigits * kBuckets);
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t key = key_of(scores[i]);
    scratch.keys[i] = key;
    scratch.order[i] = i;
    for (int digit = 0; digit < kDigits; ++digit) ++scratch.buckets[digit * kBuckets + digit_of(key, digit)];
  }
  uint32_t* keys[2] = {scratch.keys, scratch.other_keys};
  int32_t* orders[2] = {scratch.order, scratch.other_order};
  for (int digit = 0; digit < kDigits; ++digit) {
    uint32_t* next = scratch.buckets + digit * kBuckets;
    uint32_t start = 0;
    for (uint32_t bucket = 0; bucket < kBuckets; ++bucket) {
      const uint32_t size = next[bucket];
      next[bucket] = start;
      start += size;
    }
    const int from = digit % 2;
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t to = next[digit_of(keys[from][i], digit)]++;
      keys[1 - from][to] = keys[from][i];
      orders[1 - from][to] = orders[from][i];
    }
  }
  return orders[kDigits % 2];
}

// The pooled scores, from which the selection is made.
const float* pool(const SelectTokensArguments& a, const float* scores, int32_t count, float* pooled) {
  if (a.pooling == ScorePooling::none) return scores;
  const bool average = a.pooling == ScorePooling::average;
  for (int32_t i = 0; i < count; ++i) pooled[i] = average ? 0.0f : -__builtin_inff();
  const int32_t reach = a.pool_tokens / 2;
  for (int32_t offset = -reach; offset <= reach; ++offset) {
    const int32_t begin = offset < 0 ? -offset : 0;
    const int32_t end = offset > 0 ? count - offset : count;
    for (int32_t i = begin; i < end; ++i) {
      const float score = scores[i + offset];
      if (average) {
        pooled[i] += score;
      } else {
        pooled[i] = score > pooled[i] ? score : pooled[i];
      }
    }
  }
  for (int32_t i = 0; average && i < count; ++i) {
    if (!is_small(pooled[i])) continue;
    const int32_t first = i > reach ? i - reach : 0;
    const int32_t end = count - i > reach ? i + reach + 1 : count;
    pooled[i] = small_mean([&](int32_t k) { return scores[first + k]; }, end - first, 1, pooled[i]);
  }
  return pooled;
}

void average_blocks(const float* scores, int32_t tokens, int32_t block_tokens, float* block_scores) {
  for (int32_t first = 0; first < tokens; first += block_tokens) {
    const int32_t length = tokens - first < block_tokens ? tokens - first : block_tokens;
    double sum = 0;
    for (int32_t i = 0; i < length; ++i) sum += static_cast<double>(scores[first + i]);
    block_scores[first / block_tokens] =
        is_small(sum) ? small_mean([&](int32_t i) { return scores[first + i]; }, length, length, sum)
                      : static_cast<float>(sum / length);
  }
}

// Takes up to `quota` further blocks, those of one round of `groups` groups, and marks them in `taken`. `order` has
// the best block first. Returns for how many it found no block.
int32_t take_round(const int32_t* order, int32_t blocks, int32_t groups, int32_t quota, int32_t* group_room,
                   uint8_t* taken) {
  groups = groups < blocks ? groups : blocks;
  const auto take = [&](bool grouped) {
    for (int32_t i = 0; i < blocks && quota > 0; ++i) {
      const int32_t block = order[i];
      if (taken[block] != 0) continue;
      if (grouped) {
        int32_t& room = group_room[((int64_t{block} + 1) * groups - 1) / blocks];
        if (room == 0) continue;
        --room;
      }
      taken[block] = 1;
      --quota;
    }
  };
  const auto take_grouped = [&](int32_t room) {
    for (int32_t group = 0; group < groups; ++group) group_room[group] = room;
    take(true);
  };
  take_grouped(quota / groups);
  take_grouped(1);
  take(false);
  return quota;
}

// Takes the blocks of all rounds and marks them in `taken`.
void take_blocks(const SelectTokensArguments& a, const int32_t* order, int32_t blocks, int32_t wanted,
                 const Scratch& scratch) {
  uint8_t* taken = scratch.taken;
  std::memset(taken, 0, static_cast<size_t>(blocks));
  int32_t left = 0;
  for (int32_t round = 0; round < a.round_count; ++round) {
    const int32_t quota = wanted / a.round_count + (round < wanted % a.round_count ? 1 : 0);
    if (!a.overlapping_rounds) {
      left = take_round(order, blocks, a.rounds[round], quota + left, scratch.group_room, taken);
      continue;
    }
    std::memset(scratch.round_taken, 0, static_cast<size_t>(blocks));
    take_round(order, blocks, a.rounds[round], quota, scratch.group_room, scratch.round_taken);
    for (int32_t block = 0; block < blocks; ++block) taken[block] |= scratch.round_taken[block];
  }
}

// Marks up to `wanted` of `tokens` tokens in scratch.kept. `wanted` is at least one and less than `tokens`.
void keep_best(const SelectTokensArguments& a, const float* scores, int32_t tokens, int32_t wanted,
               int32_t block_tokens, const Scratch& scratch) {
  const int32_t length = block_tokens < wanted ? block_tokens : wanted;
  const int32_t blocks = (tokens + length - 1) / length;
  const int32_t wanted_blocks = wanted / length < blocks ? wanted / length : blocks;
  average_blocks(scores, tokens, length, scratch.block_scores);
  const int32_t* best_blocks = sort(scratch.block_scores, blocks, scratch);
  take_blocks(a, best_blocks, blocks, wanted_blocks, scratch);
  for (int32_t token = 0; token < tokens; ++token) {
    scratch.kept[token] = scratch.taken[token / length];
    wanted -= scratch.kept[token];
  }
  if (!a.fill || wanted == 0) return;
  const int32_t* best = sort(scores, tokens, scratch);
  for (int32_t i = 0; i < tokens && wanted > 0; ++i) {
    if (scratch.kept[best[i]] != 0) continue;
    scratch.kept[best[i]] = 1;
    --wanted;
  }
}

void select_row(const SelectTokensArguments& a, int64_t row, const Scratch& scratch) {
  const SelectTokensRow& asked = a.rows[row];
  const int32_t prefix = asked.prefix_tokens;
  int32_t wanted = asked.capacity - asked.window_tokens;
  wanted = wanted < 0 ? 0 : wanted < prefix ? wanted : prefix;
  const int32_t sinks = a.sink_tokens < wanted ? a.sink_tokens : wanted;
  const bool all = wanted == prefix;
  std::memset(scratch.kept, all ? 1 : 0, static_cast<size_t>(prefix));
  if (!all && wanted > sinks) {
    const float* scores = pool(a, a.scores + row * a.score_tokens, prefix, scratch.pooled);
    keep_best(a, scores + sinks, prefix - sinks, wanted - sinks, asked.block_tokens, scratch);
  }
  int32_t* indices = a.indices + row * a.index_tokens;
  int32_t count = 0;
  for (int32_t token = 0; token < sinks; ++token) indices[count++] = token;
  for (int32_t token = sinks; token < prefix; ++token) {
    if (scratch.kept[token - sinks] != 0) indices[count++] = token;
  }
  for (int32_t token = 0; token < asked.window_tokens; ++token) indices[count++] = prefix + token;
  a.counts[row] = count;
}

}  // namespace

void select_tokens(const SelectTokensArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.row_count), [&](size_t row, int worker) {
    const int32_t tokens = a.rows[row].prefix_tokens;
    void* memory = workers.scratch(worker, Scratch::bytes(tokens));
    select_row(a, static_cast<int64_t>(row), Scratch(Arena(memory), tokens));
  });
}

}  // namespace KV_ISA
}  // namespace kv
