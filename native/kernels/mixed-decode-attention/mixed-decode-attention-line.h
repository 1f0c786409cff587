// How mixed decode attention is shared out. The blocks of all entries (decode-attention-split.h) form one line. It is
// cut into equal shares, one for each thread block. Most of a share is one run, which that thread block takes; the rest
// is cut into small runs, which thread blocks take as they get done: blocks differ in bytes, and multiprocessors in the
// bandwidth that they get. Where a run and an entry meet is a segment. The line is cut by the lengths alone, not by who
// takes what, so that the results do not depend on it either. Device code.
#pragma once

#include <cstdint>

#include "kernels/decode-attention/decode-attention-split.h"
#include "kernels/mixed-blocks.h"

namespace kv {

// Lengths in blocks.
struct MixedRuns {
  static constexpr int kMostOfShare = 3;

  // Runs are multiples of the warps of a thread block, which take turns.
  __device__ MixedRuns(int blocks, int thread_blocks, int warps) {
    const auto whole = [](int length, int unit) { return (length + unit - 1) / unit * unit; };
    share = max(warps, whole((blocks + thread_blocks - 1) / thread_blocks, warps));
    small = whole((share + 15) / 16, warps);
    // Too little is not worth another partial output.
    const int rest = share <= 4 * warps ? 0 : whole((share + 7) / 8, small);
    large = share - rest;
    small_of_share = rest / small;
  }

  __device__ int first_of_share(int number) const { return number * (1 + small_of_share); }

  __device__ int first_block(int run) const {
    const int in_share = run % (1 + small_of_share);
    return run / (1 + small_of_share) * share + (in_share == 0 ? 0 : large + (in_share - 1) * small);
  }
  __device__ int run_of(int block) const {
    const int in_share = block % share;
    return first_of_share(block / share) + (in_share < large ? 0 : 1 + (in_share - large) / small);
  }

  int share;
  int large;           // the first run of a share
  int small;           // each of the others
  int small_of_share;  // how many of those
};

struct MixedPlace {
  DecodeEntry entry;
  int first_block;  // on the line
  int blocks;       // on the line
};

// Where entries lie on the line. An entry without keys has a block there, so that its output is written.
template <int kThreads, int kRows>
class MixedLine : public DecodeEntries<kMixedBlockTokens, kRows> {
 public:
  struct Shared {
    // Before the cache heads that each thread counted.
    int blocks[kThreads];
    int entries[kThreads];
    int2 warp_totals[kThreads / 32];
  };

  // All threads of a block call it.
  __device__ MixedLine(const PagedAttentionArguments& arguments, Shared& shared)
      : DecodeEntries<kMixedBlockTokens, kRows>(arguments),
        shared_(shared),
        heads_of_thread_((this->cache_heads() + kThreads - 1) / kThreads) {
    const int begin = min(static_cast<int>(threadIdx.x) * heads_of_thread_, this->cache_heads());
    const int end = min(begin + heads_of_thread_, this->cache_heads());
    int2 own = {0, 0};
    for (int cache_head = begin; cache_head < end; ++cache_head) {
      const int packs = this->packs(cache_head);
      own.x += packs * this->units(cache_head);
      own.y += packs;
    }
    int2 sum = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int2 before = {__shfl_up_sync(kFullWarp, sum.x, distance), __shfl_up_sync(kFullWarp, sum.y, distance)};
      if (static_cast<int>(threadIdx.x) % 32 >= distance) sum = {sum.x + before.x, sum.y + before.y};
    }
    if (threadIdx.x % 32 == 31) shared_.warp_totals[threadIdx.x / 32] = sum;
    __syncthreads();
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      const int2 total = shared_.warp_totals[warp];
      if (warp < static_cast<int>(threadIdx.x) / 32) sum = {sum.x + total.x, sum.y + total.y};
      blocks_ += total.x;
    }
    shared_.blocks[threadIdx.x] = sum.x - own.x;
    shared_.entries[threadIdx.x] = sum.y - own.y;
    __syncthreads();
  }

  __device__ int blocks() const { return blocks_; }

  // Unlike blocks on the line, 0 without keys.
  __device__ int key_blocks(int cache_head) const {
    return (this->key_count(cache_head) + kMixedBlockTokens - 1) / kMixedBlockTokens;
  }

  // The entry that holds a block of the line. All lanes of a warp call it.
  __device__ MixedPlace find(int block) const {
    int thread = -1;  // the last before whose cache heads there are no more blocks than that
    for (int first = 0; first < kThreads; first += 32) {
      thread += __popc(__ballot_sync(kFullWarp, shared_.blocks[first + threadIdx.x % 32] <= block));
    }
    int cache_head = thread * heads_of_thread_;
    int first_block = shared_.blocks[thread];
    int first_entry = shared_.entries[thread];
    for (;; ++cache_head) {
      const int packs = this->packs(cache_head);
      const int blocks = this->units(cache_head);
      if (block < first_block + packs * blocks) {
        const int pack = (block - first_block) / blocks;
        return {{first_entry + pack, cache_head, pack}, first_block + pack * blocks, blocks};
      }
      first_block += packs * blocks;
      first_entry += packs;
    }
  }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;

  Shared& shared_;
  const int heads_of_thread_;
  int blocks_ = 0;
};

struct MixedSegment {
  DecodeEntry entry = {};
  int64_t table_row = 0;
  int first_block = 0;  // of the entry
  int end_block = 0;
  int number = 0;        // among all segments, those of an entry being neighbours
  int first_number = 0;  // of the entry's first
  int count = 0;         // of the entry
};

// Which small runs a thread block takes: its warps ask for the next one at different times and get the same answer.
class MixedTickets {
 public:
  // Zero before and after a launch; in global memory.
  struct Counters {
    unsigned taken;
    unsigned finished;  // thread blocks
  };

  // `answer` is in shared memory.
  __device__ MixedTickets(Counters& counters, int& answer) : counters_(counters), answer_(answer) {}

  // One thread calls it, between two barriers: at first, and whenever all warps know the answer.
  __device__ void forget() { answer_ = kUnknown; }

  // All lanes of a warp call it.
  __device__ int next() {
    int answer = 0;
    if (threadIdx.x % 32 == 0) {
      answer = atomicCAS(&answer_, kUnknown, kAsked);
      if (answer == kUnknown) {
        answer = atomicAdd(&counters_.taken, 1u);
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
};

// Goes through the segments that a thread block takes. All its warps do the same.
template <typename Line>
class MixedTurns {
 public:
  __device__ MixedTurns(const Line& line, const MixedRuns& runs, const MixedTickets& tickets)
      : line_(line), runs_(runs), tickets_(tickets) {
    enter(runs.first_of_share(blockIdx.x));
  }

  // False when there are no more.
  __device__ bool next(MixedSegment& segment) {
    if (block_ >= end_block_) {
      if (runs_.small_of_share == 0) return false;
      const int small = tickets_.next();
      enter(runs_.first_of_share(small / runs_.small_of_share) + 1 + small % runs_.small_of_share);
      if (block_ >= end_block_) return false;
    }
    const MixedPlace place = line_.find(block_);
    const int end = min(end_block_, place.first_block + place.blocks);
    segment.entry = place.entry;
    segment.table_row = line_.table_row(place.entry.cache_head);
    segment.first_block = block_ - place.first_block;
    segment.end_block = min(end - place.first_block, line_.key_blocks(place.entry.cache_head));
    const int first_run = runs_.run_of(place.first_block);
    segment.number = run_ + place.entry.index;
    segment.first_number = first_run + place.entry.index;
    segment.count = runs_.run_of(place.first_block + place.blocks - 1) - first_run + 1;
    block_ = end;
    return true;
  }

 private:
  __device__ void enter(int run) {
    run_ = run;
    block_ = runs_.first_block(run);
    end_block_ = min(runs_.first_block(run + 1), line_.blocks());
  }

  const Line& line_;
  const MixedRuns& runs_;
  MixedTickets tickets_;
  int run_;
  int block_;  // what is next, on the line
  int end_block_;
};

}  // namespace kv
