// Finds where a sum is reached, among bins or among candidates in descending order. Device code.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/select-by-mass/select-by-mass-shares.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

constexpr int kBinThreads = 256;
constexpr int kThresholdThreads = 1024;

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
  // Of a whole warp: each lane has a range of its own. Most lie within what is known.
  __device__ void include(const OrderRange& own) {
    const uint32_t to = __reduce_max_sync(0xffffffffu, own.most);
    const uint32_t from = __reduce_max_sync(0xffffffffu, own.least_inverted);
    if (threadIdx.x % kWarp != 0) return;
    if (to > __ldcg(&most)) atomicMax(&most, to);
    if (from > __ldcg(&least_inverted)) atomicMax(&least_inverted, from);
  }
  __device__ uint64_t greatest_key() const { return candidate_key(__ldcg(&most), 0); }
  __device__ uint64_t least_key(int tokens) const { return candidate_key(~__ldcg(&least_inverted), tokens - 1); }
};

// What leads to the last candidate that is taken.
struct Cut {
  int32_t bin;         // -1 if none is taken
  unsigned found;      // candidates in that bin
  uint64_t wanted;     // sum that they must have
  uint64_t above;      // sum of the bins above
  unsigned arrivals;   // of thread blocks that have counted, or that search
  OrderRange range;    // of candidates that are too many to be listed
  unsigned summed;     // thread blocks that have summed what is left of a list
  unsigned rest;       // candidates that a team's search leaves, and lists
};

// The sums of a thread block's bins, which it clears.
class BinScan {
 public:
  using Scan = cub::BlockScan<uint64_t, kBinThreads>;

  __device__ BinScan(uint64_t* bins, typename Scan::TempStorage& storage) {
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int bin = first() + i;
      own_[i] = bin < cuda::kShareBins ? __ldcg(bins + bin) : 0;
      if (bin < cuda::kShareBins) bins[bin] = 0;
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
        cut.above = above;
        cut.wanted = wanted - above;
      }
      above += own_[i];
    }
  }

 private:
  static constexpr int kOwn = (cuda::kShareBins + kBinThreads - 1) / kBinThreads;
  static __device__ int first() { return static_cast<int>(threadIdx.x) * kOwn; }

  uint64_t own_[kOwn];
  uint64_t before_;
  uint64_t all_;
};

// Calls body(key) for the keys of a list, each in one thread. Several are loaded before the first is used.
template <class Body>
__device__ void for_each_key(const uint64_t* keys, int count, Body body) {
  constexpr int kBatch = 4096 / kThresholdThreads;
  for (int first = static_cast<int>(threadIdx.x); first < count; first += kBatch * kThresholdThreads) {
    uint64_t own[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) own[i] = __ldcg(keys + min(first + i * kThresholdThreads, count - 1));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kThresholdThreads < count) body(own[i]);
    }
  }
}

// The least key that is taken, if the best candidates are, as few as have the wanted sum. for_each(body) must call
// body(key, amount) for each candidate, each in one thread of the block.
class KeyThreshold {
 public:
  static constexpr int kDigitBits = 11;
  static constexpr int kDigits = 1 << kDigitBits;
  static constexpr int kOwn = kDigits / kThresholdThreads;
  using Scan = cub::BlockScan<uint64_t, kThresholdThreads>;

  struct Shared {
    unsigned long long sums[kDigits];
    unsigned counts[kDigits];
    typename Scan::TempStorage scan;
    unsigned long long least;
    unsigned long long most;
    uint64_t wanted;
    uint64_t prefix;
    bool alone;
  };

  template <class ForEach>
  static __device__ uint64_t find(uint64_t wanted, Shared& shared, ForEach for_each) {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      shared.least = UINT64_MAX;
      shared.most = 0;
      shared.wanted = wanted;
    }
    __syncthreads();
    uint64_t least = UINT64_MAX;
    uint64_t most = 0;
    for_each([&](uint64_t key, uint64_t) {
      least = min(least, key);
      most = max(most, key);
    });
    atomicMin(&shared.least, static_cast<unsigned long long>(least));
    atomicMax(&shared.most, static_cast<unsigned long long>(most));
    __syncthreads();
    int bits = 64 - __clzll(static_cast<long long>(shared.least ^ shared.most));
    if (thread == 0) shared.prefix = shared.most >> bits << bits;  // keys have fewer than 64 bits
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
