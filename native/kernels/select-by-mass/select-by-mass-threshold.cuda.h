// Finds where a sum is reached, among bins or among candidates in descending order. Device code.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/select-by-mass/select-by-mass-shares.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

constexpr int kThresholdThreads = 512;
constexpr int kSumThreads = 512;
constexpr int kSumBlocks = 2;  // of a multiprocessor
// Of a thread: so few that sums of other heads' values find room on the multiprocessor beside two thread blocks.
constexpr int kRegisters = 56;
constexpr int kBins = 2048;  // that sums are counted in

// A number for a token: greater means better, of equal orders the lower token.
constexpr int kTokenBits = 24;
constexpr uint32_t kTokenMask = (1u << kTokenBits) - 1;
static_assert(kMostScoredTokens <= 1 << kTokenBits, "a token has a number");
__device__ inline uint64_t candidate_key(uint32_t order, int token) {
  return uint64_t{order} << kTokenBits | (kTokenMask - static_cast<uint32_t>(token));
}
__device__ inline int token_of(uint64_t key) { return static_cast<int>(kTokenMask - (static_cast<uint32_t>(key) & kTokenMask)); }
__device__ inline uint32_t order_of_key(uint64_t key) { return static_cast<uint32_t>(key >> kTokenBits); }
__device__ inline float score_of_key(uint64_t key) { return __uint_as_float(cuda::bits_of_order(order_of_key(key))); }

// The range of orders that several thread blocks have found. Empty where all is 0.
struct OrderRange {
  uint32_t most;
  uint32_t least_inverted;

  __device__ void add(uint32_t order) {
    most = max(most, order);
    least_inverted = max(least_inverted, ~order);
  }
  // Each lane of a whole warp has a range of its own; then all have that of all.
  __device__ void reduce() {
    most = __reduce_max_sync(0xffffffffu, most);
    least_inverted = __reduce_max_sync(0xffffffffu, least_inverted);
  }
  // Of a whole warp. Most ranges lie within what is known.
  __device__ void include(OrderRange own) {
    own.reduce();
    if (threadIdx.x % kWarp != 0) return;
    if (own.most > __ldcg(&most)) atomicMax(&most, own.most);
    if (own.least_inverted > __ldcg(&least_inverted)) atomicMax(&least_inverted, own.least_inverted);
  }
  __device__ bool is_one() const { return __ldcg(&most) == ~__ldcg(&least_inverted); }
  __device__ uint64_t greatest_key() const { return candidate_key(__ldcg(&most), 0); }
  __device__ uint64_t least_key(int tokens) const { return candidate_key(~__ldcg(&least_inverted), tokens - 1); }
};

// What leads to the last candidate that is taken.
struct Cut {
  int32_t bin;         // -1 if none is taken
  unsigned found;      // candidates in that bin
  uint64_t wanted;     // sum that they must have
  uint64_t above;      // sum of the bins above
  uint64_t sum;        // of that bin
  unsigned arrivals;   // of thread blocks that have counted
  OrderRange range;    // of candidates that are too many to be listed
  unsigned summed;     // thread blocks that have summed what is left of a list
  unsigned rest;       // candidates that a team's search leaves, and lists
};

// The sums of a thread block's bins, which it clears.
class BinScan {
 public:
  using Scan = cub::BlockScan<uint64_t, kSumThreads, cub::BLOCK_SCAN_WARP_SCANS>;

  __device__ BinScan(uint64_t* bins, typename Scan::TempStorage& storage) {
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own_[i] = __ldcg(bins + first() + i);
      bins[first() + i] = 0;
      sum += own_[i];
    }
    Scan(storage).ExclusiveSum(sum, before_, all_);
  }

  __device__ uint64_t all() const { return all_; }

  // `wanted` is above 0 and at most all().
  __device__ void find(uint64_t wanted, Cut& cut) const {
    uint64_t above = before_;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (above < wanted && wanted <= above + own_[i]) {
        cut.bin = first() + i;
        cut.above += above;
        cut.wanted = wanted - above;
        cut.sum = own_[i];
      }
      above += own_[i];
    }
  }

 private:
  static constexpr int kOwn = kBins / kSumThreads;
  static __device__ int first() { return static_cast<int>(threadIdx.x) * kOwn; }

  uint64_t own_[kOwn];
  uint64_t before_;
  uint64_t all_;
};

// The keys of a list, each in one thread of the block. The first ones stay in registers.
class ListedKeys {
 public:
  __device__ ListedKeys(const uint64_t* keys, int count) : keys_(keys), count_(count) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held_[i] = place(i) < count ? __ldcg(keys + place(i)) : 0;
  }

  // Calls body(key) for each.
  template <class Body>
  __device__ void for_each(Body body) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (place(i) < count_) body(held_[i]);
    }
#pragma unroll 4
    for (int i = place(kHeld); i < count_; i += kThresholdThreads) body(__ldcg(keys_ + i));
  }

 private:
  static constexpr int kHeld = 4;
  static __device__ int place(int i) { return static_cast<int>(threadIdx.x) + i * kThresholdThreads; }

  const uint64_t* keys_;
  int count_;
  uint64_t held_[kHeld];
};

// The least key that is taken, if the best candidates are, as few as have the wanted sum. for_each(body) must call
// body(key, amount) for each candidate, each in one thread of the block.
class KeyThreshold {
 public:
  static constexpr int kDigitBits = 11;
  static constexpr int kDigits = 1 << kDigitBits;
  static constexpr int kOwn = kDigits / kThresholdThreads;
  using Scan = cub::BlockScan<uint64_t, kThresholdThreads, cub::BLOCK_SCAN_WARP_SCANS>;

  struct Shared {
    unsigned long long sums[kDigits];
    unsigned counts[kDigits];
    typename Scan::TempStorage scan;
    OrderRange range;
    uint64_t wanted;
    uint64_t prefix;
    bool alone;
  };

  template <class ForEach>
  static __device__ uint64_t find(uint64_t wanted, Shared& shared, ForEach for_each) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      shared.range = {};
      shared.wanted = wanted;
    }
    __syncthreads();
    OrderRange own_range{};
    for_each([&](uint64_t key, uint64_t) { own_range.add(order_of_key(key)); });
    own_range.reduce();
    if (thread % kWarp == 0) {
      atomicMax(&shared.range.most, own_range.most);
      atomicMax(&shared.range.least_inverted, own_range.least_inverted);
    }
    __syncthreads();
    const uint32_t most = shared.range.most;
    int bits = kTokenBits + 32 - __clz(static_cast<int>(most ^ ~shared.range.least_inverted));
    if (thread == 0) shared.prefix = candidate_key(most, 0) >> bits << bits;  // keys have fewer than 64 bits
    __syncthreads();
    while (bits > 0) {
      const int low = max(0, bits - kDigitBits);
      for (int digit = thread; digit < kDigits; digit += kThresholdThreads) {
        shared.sums[digit] = 0;
        shared.counts[digit] = 0;
      }
      __syncthreads();
      const uint64_t prefix = shared.prefix;
      const uint64_t left = shared.wanted;
      for_each([&](uint64_t key, uint64_t amount) {
        if (((key ^ prefix) >> bits) != 0) return;
        const int digit = static_cast<int>(key >> low) & (kDigits - 1);
        atomicAdd(&shared.sums[digit], static_cast<unsigned long long>(amount));
        atomicAdd(&shared.counts[digit], 1u);
      });
      __syncthreads();
      // The highest digits are the first thread's.
      uint64_t own[kOwn];
      uint64_t sum = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) sum += own[i] = shared.sums[kDigits - 1 - thread * kOwn - i];
      uint64_t before = 0;
      Scan(shared.scan).ExclusiveSum(sum, before);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int digit = kDigits - 1 - thread * kOwn - i;
        if (before < left && left <= before + own[i]) {
          shared.prefix = prefix | static_cast<uint64_t>(digit) << low;
          shared.wanted = left - before;
          shared.alone = shared.counts[digit] == 1;
        }
        before += own[i];
      }
      __syncthreads();
      bits = shared.alone ? 0 : low;
    }
    return shared.prefix;
  }
};

}  // namespace kv
