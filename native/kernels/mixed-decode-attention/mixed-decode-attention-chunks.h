// How mixed decode attention is shared out. Entries (decode-attention-split.h) are cut into chunks of blocks, which
// thread blocks take one after the other: blocks differ in bytes, and multiprocessors in the bandwidth that they get.
// First each takes a large chunk, most of its share; small ones even out when they finish. Where an entry is cut does
// not depend on who takes what, so neither do the results. Device code.
#pragma once

#include <cstdint>

#include "kernels/decode-attention/decode-attention-split.h"
#include "kernels/mixed-blocks.h"

namespace kv {

// At most so many chunks for each thread block, one a multiprocessor, and one for each entry.
constexpr int kMixedChunksPerBlock = 18;

template <int kRows>
class MixedEntries : public DecodeEntries<kMixedBlockTokens, kRows> {
 public:
  using DecodeEntries<kMixedBlockTokens, kRows>::DecodeEntries;

  // Unlike units, 0 without keys.
  __device__ int key_blocks(int cache_head) const {
    return (this->key_count(cache_head) + kMixedBlockTokens - 1) / kMixedBlockTokens;
  }
};

// Blocks of a chunk are multiples of the warps that share it.
struct MixedChunkSizes {
  int share;  // blocks for each thread block
  int large;
  int small;

  __device__ int large_count(int blocks) const { return large > 0 ? blocks / share : 0; }
  // Without blocks still one, so that the output is written.
  __device__ int small_count(int blocks) const {
    return max(blocks == 0 ? 1 : 0, (blocks - large_count(blocks) * large + small - 1) / small);
  }
};

// All threads call it; `sum` is in shared memory.
template <int kWarps, int kRows>
__device__ MixedChunkSizes mixed_chunk_sizes(const PagedAttentionArguments& arguments, unsigned long long& sum) {
  const MixedEntries<kRows> entries(arguments);
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  unsigned long long own = 0;
  for (int cache_head = threadIdx.x; cache_head < entries.cache_heads(); cache_head += 32 * kWarps) {
    own += static_cast<unsigned long long>(entries.packs(cache_head)) * entries.key_blocks(cache_head);
  }
  if (own != 0) atomicAdd(&sum, own);
  __syncthreads();
  const auto whole = [](int blocks) { return (blocks + kWarps - 1) / kWarps * kWarps; };
  const int share = max(1, static_cast<int>((sum + gridDim.x - 1) / gridDim.x));
  // Too little to be worth another chunk.
  if (share <= 4 * kWarps) return {share, 0, whole(share)};
  return {share, share * 7 / 8 / kWarps * kWarps, whole((share + 15) / 16)};
}

struct MixedChunk {
  int number = 0;        // among all chunks, those of an entry being neighbours
  int first_number = 0;  // of the entry's first
  int count = 0;         // of the entry
  DecodeEntry entry = {};
  int64_t table_row = 0;
  int first_block = 0;
  int end_block = 0;
};

// Goes through the chunks in the order in which they are taken. All lanes of a warp do the same.
template <int kRows>
class MixedChunks {
 public:
  __device__ MixedChunks(const PagedAttentionArguments& arguments, const MixedChunkSizes& sizes)
      : entries_(arguments), sizes_(sizes), small_(sizes.large == 0) {}

  // Finds the chunk that is taken as number `turn`, not before the last one found. False when there are not so many.
  __device__ bool find(int turn, MixedChunk& chunk) {
    const int lane = threadIdx.x % 32;
    for (;;) {
      if (cache_head_ >= entries_.cache_heads()) {
        if (small_) return false;
        small_ = true;
        cache_head_ = chunks_before_ = entries_before_ = 0;
      }
      const int cache_head = cache_head_ + lane;
      const bool there = cache_head < entries_.cache_heads();
      const int packs = there ? entries_.packs(cache_head) : 0;
      const int blocks = there ? entries_.key_blocks(cache_head) : 0;
      const int large = sizes_.large_count(blocks);
      const int count = large + sizes_.small_count(blocks);
      const int turns = small_ ? count - large : large;
      int packs_before = packs, counts_before = packs * count, turns_after = packs * turns;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int lower_packs = __shfl_up_sync(kFullWarp, packs_before, distance);
        const int lower_counts = __shfl_up_sync(kFullWarp, counts_before, distance);
        const int lower_turns = __shfl_up_sync(kFullWarp, turns_after, distance);
        if (lane < distance) continue;
        packs_before += lower_packs;
        counts_before += lower_counts;
        turns_after += lower_turns;
      }
      const unsigned beyond = __ballot_sync(kFullWarp, turns_before_ + turns_after > turn);
      if (beyond != 0) {
        const int owner = __ffs(beyond) - 1;
        const auto of_owner = [&](int value) { return __shfl_sync(kFullWarp, value, owner); };
        const int turns_of_owner = of_owner(turns);
        const int offset = turn - turns_before_ - of_owner(turns_after - packs * turns);
        const int pack = offset / turns_of_owner;
        const int in_pack = offset - pack * turns_of_owner;
        const int larges = of_owner(large);
        chunk.count = of_owner(count);
        chunk.first_number = chunks_before_ + of_owner(counts_before - packs * count) + pack * chunk.count;
        chunk.number = chunk.first_number + in_pack + (small_ ? larges : 0);
        chunk.entry = {entries_before_ + of_owner(packs_before - packs) + pack, cache_head_ + owner, pack};
        chunk.table_row = entries_.table_row(chunk.entry.cache_head);
        const int size = small_ ? sizes_.small : sizes_.large;
        chunk.first_block = (small_ ? larges * sizes_.large : 0) + in_pack * size;
        chunk.end_block = min(chunk.first_block + size, of_owner(blocks));
        return true;
      }
      turns_before_ += __shfl_sync(kFullWarp, turns_after, 31);
      chunks_before_ += __shfl_sync(kFullWarp, counts_before, 31);
      entries_before_ += __shfl_sync(kFullWarp, packs_before, 31);
      cache_head_ += 32;
    }
  }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;

  const MixedEntries<kRows> entries_;
  const MixedChunkSizes sizes_;
  bool small_;  // all large chunks come first
  // Cache heads are looked at 32 at a time. What lies before cache_head_:
  int cache_head_ = 0;
  int turns_before_ = 0;
  int chunks_before_ = 0;
  int entries_before_ = 0;
};

// Which chunks a thread block takes: its warps ask for the next one at different times and get the same answer.
class MixedTickets {
 public:
  // Zero before and after a launch; in global memory.
  struct Counters {
    unsigned taken;
    unsigned finished;  // thread blocks
  };

  // `answer` is in shared memory.
  __device__ MixedTickets(Counters& counters, int& answer) : counters_(counters), answer_(answer) {}

  // One thread calls it, between two barriers: at first, and after each chunk.
  __device__ void forget() { answer_ = kUnknown; }

  // All lanes of a warp call it.
  __device__ int next() {
    if (first_) {
      first_ = false;
      return blockIdx.x;
    }
    int answer = 0;
    if (threadIdx.x % 32 == 0) {
      answer = atomicCAS(&answer_, kUnknown, kAsked);
      if (answer == kUnknown) {
        answer = gridDim.x + atomicAdd(&counters_.taken, 1u);
        atomicExch(&answer_, answer);
      }
      while (answer == kAsked) answer = atomicCAS(&answer_, kAsked, kAsked);
    }
    return __shfl_sync(0xffffffffu, answer, 0);
  }

  // The last thread block to finish leaves zeros behind. One thread calls it.
  __device__ void finish() {
    if (atomicAdd(&counters_.finished, 1u) + 1 < gridDim.x) return;
    counters_.taken = 0;
    counters_.finished = 0;
  }

 private:
  static constexpr int kUnknown = -1;
  static constexpr int kAsked = -2;  // some warp is about to know it

  Counters& counters_;
  int& answer_;
  bool first_ = true;  // which needs no asking
};

}  // namespace kv
