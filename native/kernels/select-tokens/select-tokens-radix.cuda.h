// Finds the best candidates by radix selection: it finds the last candidate that is taken, eight bits at a time.
// Nothing is sorted or moved. It works on several groups of neighbours at once. A team of thread blocks, which is one
// cluster, shares the work. Device code.
#pragma once

#include <cstdint>

#include "ptx/cluster.cuda.h"

namespace kv {

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kRadixGroups = 16;  // groups at once: one warp finds the threshold of each
constexpr int kRadixBuckets = 256;

// A number for one of up to `size` candidates. Greater means better, and all numbers differ: of equal orders the
// lower index is better.
__device__ inline uint64_t candidate(uint32_t order, int index, int size) {
  return uint64_t{order} << 32 | static_cast<uint32_t>(size - 1 - index);
}
__device__ inline int index_of_candidate(uint64_t candidate, int size) {
  return size - 1 - static_cast<int>(static_cast<uint32_t>(candidate));
}

// The thread blocks of a cluster that work together, or a single one.
struct Team {
  int rank;
  int ranks;

  __device__ void sync() const { ranks == 1 ? __syncthreads() : ptx::cluster_sync(); }
  __device__ int thread() const { return rank * kSelectThreads + static_cast<int>(threadIdx.x); }
  __device__ int threads() const { return ranks * kSelectThreads; }
  // Reads, in another thread block, the place that `shared` has here.
  __device__ uint4 load(const void* shared, int of_rank) const {
    return ranks == 1 ? *static_cast<const uint4*>(shared) : ptx::cluster_load(shared, static_cast<uint32_t>(of_rank));
  }
};

// Groups first .. first + count - 1, if `size` candidates are divided into `of` groups.
struct RadixGroups {
  int first;
  int count;  // at most kRadixGroups
  int of;
  int size;

  __device__ int begin(int group) const { return static_cast<int>(int64_t{first + group} * size / of); }
};

struct RadixGroup {
  uint64_t threshold;  // the last candidate that is taken, as far as its bits are known; better ones are too
  int left;            // how many to take among those that begin like the threshold
  int taken;
  bool done;
};

// The candidates. `orders` are greater for better scores; 0 means no candidate. A candidate whose bit of `taken` is
// set is excluded.
struct Candidates {
  const uint32_t* orders;
  const uint32_t* taken;  // or null
  const uint32_t* best;   // or null: the greatest order of each word of 32
};

// Other thread blocks of the team write these words, so the read bypasses L1.
__device__ inline uint32_t read_word(const uint32_t* words, int i) {
  return *const_cast<const volatile uint32_t*>(words + i);
}

// The words that a warp of the team reads: every step-th word of 32 candidates of one group.
class RadixShare {
 public:
  __device__ RadixShare(const Team& team, const RadixGroups& groups) : groups_(groups) {
    const int warps = kSelectWarps / groups.count;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    group_ = warp / warps;
    if (group_ >= groups.count) return;
    begin_ = groups.begin(group_);
    end_ = groups.begin(group_ + 1);
    first_word_ = begin_ / 32 + warp % warps + warps * team.rank;
    step_ = warps * team.ranks;
  }

  __device__ const RadixGroups& groups() const { return groups_; }
  // This warp's group. If the warp has none, the number is not less than the count of groups.
  __device__ int group() const { return group_; }

  // Calls body(word, order). The lanes hold the 32 candidates of a word, with 0 for those outside the group. Several
  // words are loaded before the first is used.
  template <class Body>
  __device__ void for_each(const Candidates& from, Body body) const {
    constexpr int kBatch = 8;
    for (int word = first_word_; word * 32 < end_; word += step_ * kBatch) {
      uint32_t orders[kBatch];
      uint32_t taken[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = min(max(index_of(word + i * step_), begin_), end_ - 1);
        orders[i] = __ldcg(from.orders + index);
        taken[i] = from.taken == nullptr ? 0 : read_word(from.taken, index / 32);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = index_of(word + i * step_);
        const bool free = index >= begin_ && index < end_ && (taken[i] >> index % 32 & 1) == 0;
        if ((word + i * step_) * 32 < end_) body(word + i * step_, free ? orders[i] : 0);
      }
    }
  }

  static __device__ int index_of(int word) { return word * 32 + static_cast<int>(threadIdx.x) % 32; }

 private:
  const RadixGroups groups_;
  int group_;
  int begin_ = 0;
  int end_ = 0;
  int first_word_ = 0;
  int step_ = 1;
};

// Finds the thresholds of groups, one digit at a time. The counts of a thread block are where its team can read them.
class RadixDigits {
 public:
  __device__ RadixDigits(const Team& team, int groups, int size, uint32_t (*buckets)[kRadixBuckets],
                         RadixGroup* states)
      : team_(team),
        groups_(groups),
        size_(size),
        buckets_(buckets),
        states_(states),
        thread_(threadIdx.x),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {}

  __device__ const RadixGroup& state(int group) const { return states_[group]; }

  // Finds the threshold of each group, at which the best `wanted` candidates begin. If there are fewer candidates,
  // all are taken. count(shift) must add the digit at `shift` of each candidate that begins like its group's
  // threshold.
  template <class Count>
  __device__ void find_thresholds(int wanted, Count count) {
    if (thread_ < groups_) states_[thread_] = {0, wanted, 0, false};
#pragma unroll 1
    for (int shift = 56; shift >= 0; shift = next_digit(shift)) {
      count_digits([&] { count(shift); });
      if (warp_ < groups_ && !states_[warp_].done) pick(shift);
      team_.sync();
      const bool done = lane_ >= groups_ || states_[lane_].done;
      if (__all_sync(0xffffffffu, done)) return;
    }
  }

  // Clears the counts, calls count(), and waits for the counts of the team.
  template <class Count>
  __device__ void count_digits(Count count) {
    for (int i = thread_; i < groups_ * kRadixBuckets; i += kSelectThreads) {
      buckets_[i / kRadixBuckets][i % kRadixBuckets] = 0;
    }
    __syncthreads();
    count();
    team_.sync();
  }

  static __device__ bool begins_like(uint64_t own, const RadixGroup& group, int shift) {
    return (own ^ group.threshold) >> shift >> 8 == 0;
  }

  // Counts a digit in each lane. All lanes must have the same group. Scores are often alike, so all lanes with the
  // first lane's digit are counted in one atomic operation.
  __device__ void add(int group, bool counts, uint32_t digit) {
    const unsigned all = __ballot_sync(0xffffffffu, counts);
    if (all == 0) return;
    uint32_t* buckets = buckets_[group];
    const uint32_t bucket = digit % kRadixBuckets;
    const int first = __ffs(static_cast<int>(all)) - 1;
    const uint32_t of_first = __shfl_sync(0xffffffffu, bucket, first);
    const bool as_first = counts && bucket == of_first;
    const unsigned together = __ballot_sync(0xffffffffu, as_first);
    if (lane_ == first) {
      atomicAdd(&buckets[bucket], __popc(together));
    } else if (counts && !as_first) {
      atomicAdd(&buckets[bucket], 1u);
    }
  }

  // Counts down from the highest bucket of this warp's group, to the bucket where the count reaches `left`. The lane
  // that has this bucket calls found(bucket, above, here). Returns the count of all buckets.
  template <class Found>
  __device__ int find_bucket(int left, Found found) const {
    int own[kOwn];
    add_counts(own);
    int sum = 0;
#pragma unroll
    for (const int count : own) sum += count;
    int from_here = sum;  // count of this lane's buckets and all higher ones
    for (int distance = 1; distance < 32; distance *= 2) {
      const int higher = __shfl_down_sync(0xffffffffu, from_here, distance);
      if (lane_ + distance < 32) from_here += higher;
    }
    int above = from_here - sum;
#pragma unroll
    for (int i = kOwn - 1; i >= 0; --i) {
      if (above < left && above + own[i] >= left) found(lane_ * kOwn + i, above, own[i]);
      above += own[i];
    }
    return __shfl_sync(0xffffffffu, from_here, 0);
  }

 private:
  // The lower half of a candidate has only as many digits as indices need.
  __device__ int next_digit(int shift) const {
    if (shift != 32) return shift - 8;
    const int bits = 32 - __clz(size_ - 1);
    return (bits + 7) / 8 * 8 - 8;
  }

  // Adds up the team's counts of this lane's eight buckets, for this warp's group.
  static constexpr int kOwn = kRadixBuckets / 32;
  __device__ void add_counts(int (&own)[kOwn]) const {
    for (int& count : own) count = 0;
    for (int rank = 0; rank < team_.ranks; ++rank) {
#pragma unroll
      for (int i = 0; i < kOwn; i += 4) {
        const uint4 counts = team_.load(&buckets_[warp_][lane_ * kOwn + i], rank);
        own[i] += static_cast<int>(counts.x);
        own[i + 1] += static_cast<int>(counts.y);
        own[i + 2] += static_cast<int>(counts.z);
        own[i + 3] += static_cast<int>(counts.w);
      }
    }
  }

  // Finds, in this warp, the next digit of its group's threshold.
  __device__ void pick(int shift) {
    RadixGroup& shared = states_[warp_];
    RadixGroup group = shared;
    __syncwarp();
    const int all = find_bucket(group.left, [&](int bucket, int above, int here) {
      group.threshold |= static_cast<uint64_t>(bucket) << shift;
      group.left -= above;
      group.taken += above;
      group.done = here == group.left;
      if (group.done) group.taken += here;
      shared = group;
    });
    // There are fewer candidates than are wanted, so all are taken.
    if (all < group.left && lane_ == 0) shared = {0, 0, all, true};
  }

  const Team team_;
  const int groups_;
  const int size_;
  uint32_t (*const buckets_)[kRadixBuckets];
  RadixGroup* const states_;
  const int thread_;
  const int lane_;
  const int warp_;
};

// Sets the bits of the best `wanted` candidates (at least one) of each group, or of all if there are fewer. Returns
// how many it set. It is not inlined: the code is long, and few thread blocks run it.
__device__ __noinline__ int take_best_of_all(Team team, RadixGroups groups, int wanted, Candidates from,
                                             uint32_t* bits) {
  __shared__ alignas(16) uint32_t buckets[kRadixGroups][kRadixBuckets];
  __shared__ RadixGroup states[kRadixGroups];
  RadixDigits digits(team, groups.count, groups.size, buckets, states);
  const RadixShare share(team, groups);
  const int own_group = share.group();
  digits.find_thresholds(wanted, [&](int shift) {
    if (own_group >= groups.count || digits.state(own_group).done) return;
    const RadixGroup group = digits.state(own_group);
    share.for_each(from, [&](int word, uint32_t order) {
      const uint64_t own = candidate(order, RadixShare::index_of(word), groups.size);
      digits.add(own_group, order != 0 && RadixDigits::begins_like(own, group, shift),
                 static_cast<uint32_t>(own >> shift));
    });
  });
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int taken = __reduce_add_sync(0xffffffffu, lane < groups.count ? states[lane].taken : 0);
  const uint64_t threshold = states[own_group % kRadixGroups].threshold;
  share.for_each(from, [&](int word, uint32_t order) {
    const uint64_t own = candidate(order, RadixShare::index_of(word), groups.size);
    const unsigned takes = __ballot_sync(0xffffffffu, order != 0 && own >= threshold);
    if (takes != 0 && lane == 0) atomicOr(bits + word, takes);
  });
  team.sync();
  return taken;
}

}  // namespace kv
