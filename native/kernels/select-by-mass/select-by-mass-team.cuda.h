// Finds the last token that is taken among candidates that are too many to be listed: several thread blocks read the
// scores of all tokens. Device code.
#pragma once

#include <cuda/atomic>

#include "kernels/select-by-mass/select-by-mass-state.cuda.h"

namespace kv {

__device__ inline uint64_t warp_sum(uint64_t own) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) own += __shfl_xor_sync(0xffffffffu, own, distance);
  return own;
}

constexpr int kTeamTokens = 32768;  // of a thread block, where a team has fewer than kMostMembers
constexpr int kMostMembers = 32;

constexpr int kKeyBatch = 4;
using BatchOfKeys = uint64_t[kKeyBatch];

// The thread blocks that search the candidates of one head or list. They wait for each other, so all of them must run
// at once: they are few, and neighbours in the grid, whose blocks start in order.
class Team {
 public:
  __device__ Team(unsigned& arrivals, int member, int members) : arrivals_(arrivals), member_(member), members_(members) {}

  __device__ int member() const { return member_; }
  __device__ int members() const { return members_; }

  // What any member wrote before is visible to all afterwards, past the L1.
  __device__ void meet() {
    __syncthreads();
    met_ += static_cast<unsigned>(members_);
    if (threadIdx.x == 0) {
      const ::cuda::atomic_ref<unsigned, ::cuda::thread_scope_device> arrivals(arrivals_);
      arrivals.fetch_add(1, ::cuda::memory_order_acq_rel);
      while (arrivals.load(::cuda::memory_order_acquire) < met_) {
      }
    }
    __syncthreads();
  }

  // Calls body(token, keys), for tokens from `first` to `end`: lane i of a warp has the keys of tokens
  // `token`, token + 32, ... , which are 0 where no candidate is.
  template <class Candidates, class Body>
  __device__ void for_each(const Candidates& candidates, int first, int end, Body body) const {
    constexpr int kTokens = kKeyBatch * kThresholdThreads;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int begin = first / kWarp * kWarp + member_ * kTokens + warp * kKeyBatch * kWarp;
#pragma unroll 1
    for (int token = begin; token < end; token += members_ * kTokens) {
      BatchOfKeys keys;
      candidates.find(token + lane, end, keys);
      body(token + lane, keys);
    }
  }

 private:
  unsigned& arrivals_;
  int member_;
  int members_;
  unsigned met_ = 0;
};

// KeyThreshold by a team, of candidates with find(token, end, keys) and amount(key).
class TeamThreshold {
 public:
  static constexpr int kDigitBits = KeyThreshold::kDigitBits;
  static constexpr int kDigits = KeyThreshold::kDigits;
  static constexpr int kOwn = KeyThreshold::kOwn;
  static constexpr int kRounds = 3;  // one that is read, one that is summed, one that is cleared

  // In global memory.
  struct Sums {
    unsigned long long of[kRounds][kDigits];
  };
  static_assert(sizeof(Sums) <= kListed * sizeof(uint64_t), "the sums lie where candidates would have been listed");

  template <class Candidates>
  static __device__ uint64_t find(uint64_t wanted, Team& team, const Candidates& candidates, int tokens, KeyRange& range,
                                  Sums& all, KeyThreshold::Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x);
    KeyRange own_range{};
    team.for_each(candidates, 0, tokens, [&](int, const BatchOfKeys& keys) {
#pragma unroll
      for (const unsigned long long key : keys) {
        own_range.most = max(own_range.most, key);
        if (key != 0) own_range.least_inverted = max(own_range.least_inverted, ~key);
      }
    });
    range.include(own_range);
    clear(team, all.of[0]);
    if (thread == 0) shared.wanted = wanted;
    team.meet();
    const uint64_t greatest = range.greatest();
    int bits = 64 - __clzll(static_cast<long long>(range.least() ^ greatest));
    if (thread == 0) shared.prefix = greatest >> bits << bits;  // keys have fewer than 64 bits
    for (int round = 0; bits > 0; ++round) {
      const int low = max(0, bits - kDigitBits);
      for (int digit = thread; digit < kDigits; digit += kThresholdThreads) shared.sums[digit] = 0;
      __syncthreads();
      const uint64_t prefix = shared.prefix;
      const uint64_t left = shared.wanted;
      // Where the order is known, only its tokens are left.
      const bool tied = bits <= kTokenBits;
      const int first = tied ? token_of(prefix | ((uint64_t{1} << bits) - 1)) : 0;
      const int end = tied ? min(token_of(prefix) + 1, tokens) : tokens;
      team.for_each(candidates, first, end, [&](int, const BatchOfKeys& keys) {
#pragma unroll
        for (const uint64_t key : keys) {
          const bool counts = key != 0 && ((key ^ prefix) >> bits) == 0;
          add(shared.sums, counts, static_cast<int>(key >> low) & (kDigits - 1), counts ? candidates.amount(key) : 0);
        }
      });
      __syncthreads();
      unsigned long long* sums = all.of[round % kRounds];
      for (int digit = thread; digit < kDigits; digit += kThresholdThreads) {
        if (shared.sums[digit] != 0) atomicAdd(sums + digit, shared.sums[digit]);
      }
      clear(team, all.of[(round + 1) % kRounds]);
      team.meet();
      // The highest digits are the first thread's.
      uint64_t own[kOwn];
      uint64_t sum = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) sum += own[i] = __ldcg(sums + kDigits - 1 - thread * kOwn - i);
      uint64_t before = 0;
      KeyThreshold::Scan(shared.scan).ExclusiveSum(sum, before);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (before < left && left <= before + own[i]) {
          shared.prefix = prefix | static_cast<uint64_t>(kDigits - 1 - thread * kOwn - i) << low;
          shared.wanted = left - before;
        }
        before += own[i];
      }
      __syncthreads();
      bits = low;
    }
    __syncthreads();
    return shared.prefix;
  }

 private:
  static __device__ void clear(const Team& team, unsigned long long* sums) {
    for (int digit = team.member() * kThresholdThreads + static_cast<int>(threadIdx.x); digit < kDigits;
         digit += team.members() * kThresholdThreads) {
      sums[digit] = 0;
    }
  }

  // Of a whole warp. Ties have a digit in common, and are added once.
  static __device__ void add(unsigned long long* sums, bool counts, int digit, uint64_t amount) {
    const unsigned all = __ballot_sync(0xffffffffu, counts);
    if (all == 0) return;
    const int leader = __ffs(static_cast<int>(all)) - 1;
    const int common = __shfl_sync(0xffffffffu, digit, leader);
    if (!__all_sync(0xffffffffu, !counts || digit == common)) {
      if (counts) atomicAdd(sums + digit, static_cast<unsigned long long>(amount));
      return;
    }
    const uint64_t sum = warp_sum(amount);
    if (static_cast<int>(threadIdx.x) % kWarp == leader) atomicAdd(sums + digit, static_cast<unsigned long long>(sum));
  }
};

}  // namespace kv
