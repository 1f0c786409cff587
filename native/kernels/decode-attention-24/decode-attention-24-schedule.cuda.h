// The scheduler of decode attention over 2:4 blocks. Device code.
//
// The work list has the blocks of all entries (work-spans.cuda.h), one entry after another. It is cut into equal
// shares, one for each thread block. Most of a share is one large work tile, which that thread block computes. The
// rest of the share is cut into small work tiles, which any thread block takes when it is free: blocks differ in
// bytes, and multiprocessors in the bandwidth that they get. The blocks of one entry in one work tile are a split.
// The cuts depend only on lengths, not on which thread block takes which tile, so the results do not depend on that
// either.
#pragma once

#include <cstdint>

#include "shared/attention/decode/work-spans.cuda.h"
#include "shared/blocks-24/blocks-24.h"
#include "shared/cuda/arrivals.cuda.h"

namespace kv {

// How a work list is cut into work tiles. Lengths are in blocks.
struct WorkTiles24 {
  static constexpr int kMostOfShare = 3;

  // Lengths are multiples of the number of warps, because the warps of a thread block take blocks in turn.
  __device__ void share_out(int blocks, int thread_blocks, int warps) {
    const auto parts = [](int length, int part) { return (length + part - 1) / part; };
    share = max(1, parts(parts(blocks, thread_blocks), warps)) * warps;
    small = parts(parts(share, 32), warps) * warps;
    // If a share is short, small tiles are not worth the further partials that they cost.
    small_of_share = share <= 4 * warps ? 0 : parts(parts(share, 16), small);
    large = share - small_of_share * small;
  }

  __device__ int first_of_share(int number) const { return number * (1 + small_of_share); }

  __device__ int first_block(int tile) const {
    const int in_share = tile % (1 + small_of_share);
    return tile / (1 + small_of_share) * share + (in_share == 0 ? 0 : large + (in_share - 1) * small);
  }
  __device__ int tile_of(int block) const {
    const int in_share = block % share;
    return first_of_share(block / share) + (in_share < large ? 0 : 1 + (in_share - large) / small);
  }

  int share = 0;
  int large = 0;           // the first work tile of a share
  int small = 0;           // each other work tile of a share
  int small_of_share = 0;  // how many small work tiles a share has
};

struct Place24 {
  DecodeEntry entry;
  DecodeHead head;  // of the entry
  int first_block;  // in the work list
  int blocks;       // of the entry, in the work list
};

// The work list: where entries lie in it, and what the tables say of them. An entry without keys has one block in the
// list, so that its output is written.
template <int kThreads, int kRows>
class WorkList24 {
 public:
  using Entries = DecodeEntries<kBlock24Tokens, kRows>;
  struct Shared {
    // Blocks and entries in the list before the cache heads of each thread.
    int blocks[kThreads];
    int entries[kThreads];
    DecodeHead heads[kThreads];  // the first cache head of each thread
    int2 warp_totals[kThreads / 32];
  };

  __device__ WorkList24(const PagedAttentionArguments& arguments, Shared& shared)
      : arguments_(arguments),
        entries_(arguments),
        shared_(shared),
        heads_of_thread_((entries_.cache_heads() + kThreads - 1) / kThreads),
        begin_(min(static_cast<int>(threadIdx.x) * heads_of_thread_, entries_.cache_heads())),
        end_(min(begin_ + heads_of_thread_, entries_.cache_heads())) {}

  // Builds the list early, while the kernels ahead may still change the tables. All threads of the block call it.
  // False if rows or slots are outside their tensors; the list must not be used then.
  __device__ bool build_early() {
    early_ = heads_of_thread_ == 1 && build(Entries(arguments_, true), nullptr);
    return early_;
  }

  // Builds the list when the kernels ahead are complete. If the tables are unchanged except for new keys, the early
  // list is kept; otherwise it is rebuilt. Reports rows and slots that are out of range.
  __device__ bool build(const FaultSink& faults) {
    DecodeHead head;
    if (early_ && begin_ < end_) head = shared_.heads[threadIdx.x];
    const bool same = early_ && (begin_ == end_ || entries_.renew(begin_, head));
    early_ = __syncthreads_and(same);
    if (!early_) return build(entries_, blockIdx.x == 0 ? &faults : nullptr);
    if (begin_ < end_) shared_.heads[threadIdx.x] = head;
    __syncthreads();
    return true;
  }

  // After `build`: whether the early list was kept.
  __device__ bool is_early() const { return early_; }

  __device__ int blocks() const { return blocks_; }

  // The entry that a block of the list belongs to. All lanes of a warp call it.
  __device__ Place24 find(int block) const {
    int thread = -1;  // the last thread whose cache heads begin at this block or before it
    for (int first = 0; first < kThreads; first += 32) {
      thread += __popc(__ballot_sync(kFullWarp, shared_.blocks[first + threadIdx.x % 32] <= block));
    }
    int cache_head = thread * heads_of_thread_;
    int first_block = shared_.blocks[thread];
    int first_entry = shared_.entries[thread];
    for (;; ++cache_head) {
      const DecodeHead head = this->head(cache_head);
      const int packs = entries_.packs(head);
      const int blocks = entries_.units(head);
      if (block < first_block + packs * blocks) {
        const int pack = (block - first_block) / blocks;
        return {{first_entry + pack, cache_head, pack}, head, first_block + pack * blocks, blocks};
      }
      first_block += packs * blocks;
      first_entry += packs;
    }
  }

  __device__ DecodeHead head(int cache_head) const {
    if (heads_of_thread_ == 1) return shared_.heads[cache_head];
    DecodeHead head;
    entries_.read_head(cache_head, nullptr, head);
    return head;
  }

  __device__ const Entries& entries() const { return entries_; }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;

  __device__ bool build(const Entries& entries, const FaultSink* faults) {
    int2 own = {0, 0};
    bool inside = true;
    for (int cache_head = begin_; cache_head < end_; ++cache_head) {
      DecodeHead head;
      inside = entries.read_head(cache_head, faults, head);
      if (!inside) break;
      if (cache_head == begin_) shared_.heads[threadIdx.x] = head;
      const int packs = entries.packs(head);
      own.x += packs * entries.units(head);
      own.y += packs;
    }
    int2 sum = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int2 before = {__shfl_up_sync(kFullWarp, sum.x, distance), __shfl_up_sync(kFullWarp, sum.y, distance)};
      if (static_cast<int>(threadIdx.x) % 32 >= distance) sum = {sum.x + before.x, sum.y + before.y};
    }
    if (threadIdx.x % 32 == 31) shared_.warp_totals[threadIdx.x / 32] = sum;
    if (!__syncthreads_and(inside)) return false;
    blocks_ = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      const int2 total = shared_.warp_totals[warp];
      if (warp < static_cast<int>(threadIdx.x) / 32) sum = {sum.x + total.x, sum.y + total.y};
      blocks_ += total.x;
    }
    shared_.blocks[threadIdx.x] = sum.x - own.x;
    shared_.entries[threadIdx.x] = sum.y - own.y;
    __syncthreads();
    return true;
  }

  const PagedAttentionArguments& arguments_;
  const Entries entries_;
  Shared& shared_;
  const int heads_of_thread_;
  const int begin_;  // this thread's cache heads
  const int end_;
  bool early_ = false;
  int blocks_ = 0;
};

struct Split24 {
  DecodeEntry entry = {};
  DecodeHead head = {};  // of the entry
  int list_block = 0;   // where the split begins in the work list
  int first_block = 0;  // where the split begins in the entry
  int end_block = 0;
  int number = 0;        // among all splits; those of one entry are consecutive
  int first_number = 0;  // number of the entry's first split
  int count = 0;         // splits of the entry
};

// The counter that gives small work tiles to thread blocks, in global memory. All zero before and after a launch.
struct Tickets24 {
  unsigned taken;
  unsigned finished;  // thread blocks that take no more

  // All lanes of a warp call it.
  __device__ int take() {
    unsigned ticket = 0;
    if (threadIdx.x % 32 == 0) ticket = atomicAdd(&taken, 1u);
    return __shfl_sync(0xffffffffu, static_cast<int>(ticket), 0);
  }

  // One thread of each thread block calls it when the thread block takes no more tiles. The last call sets the
  // counter to zero.
  __device__ void finish() {
    if (arrives_last(finished, gridDim.x)) taken = 0;
  }
};

// Goes through the splits that a thread block computes. All lanes of one warp call it.
template <typename WorkList>
class SplitIterator24 {
 public:
  __device__ SplitIterator24(const WorkList& work_list, Tickets24& tickets)
      : work_list_(work_list), tickets_(tickets) {}

  // Must be called after the work list is built.
  __device__ void begin(int warps) {
    tiles_.share_out(work_list_.blocks(), gridDim.x, warps);
    enter(tiles_.first_of_share(blockIdx.x));
  }

  // Returns false when no split is left. Without `small_tiles`, it takes only the thread block's own large tile.
  __device__ bool next(bool small_tiles, Split24& split) {
    if (block_ >= end_block_) {
      if (tiles_.small_of_share == 0 || !small_tiles) return false;
      const int small = tickets_.take();
      enter(tiles_.first_of_share(small / tiles_.small_of_share) + 1 + small % tiles_.small_of_share);
      if (block_ >= end_block_) return false;
    }
    const Place24 place = work_list_.find(block_);
    const int end = min(end_block_, place.first_block + place.blocks);
    split.entry = place.entry;
    split.head = place.head;
    split.list_block = block_;
    split.first_block = block_ - place.first_block;
    split.end_block = end - place.first_block;
    const int first_tile = tiles_.tile_of(place.first_block);
    split.number = tile_ + place.entry.index;
    split.first_number = first_tile + place.entry.index;
    split.count = tiles_.tile_of(place.first_block + place.blocks - 1) - first_tile + 1;
    block_ = end;
    return true;
  }

 private:
  __device__ void enter(int tile) {
    tile_ = tile;
    block_ = tiles_.first_block(tile);
    end_block_ = min(tiles_.first_block(tile + 1), work_list_.blocks());
  }

  const WorkList& work_list_;
  Tickets24& tickets_;
  WorkTiles24 tiles_;
  int tile_ = 0;
  int block_ = 0;  // the next block in the work list
  int end_block_ = 0;
};

}  // namespace kv
