// Selects the best few of many candidates, most of which need not be read. The best order of each word of 32
// candidates gives a floor. Candidates at or above the floor are listed in shared memory, and the best are selected
// from this list. Device code.
#pragma once

#include "kernels/select-tokens/select-tokens-radix.cuda.h"

namespace kv {

constexpr int kListWorth = 128;  // a list pays from so many candidates for each wanted one
constexpr int kListed = 2048;    // candidates that a thread block can list
constexpr int kListedWords = 1024;

class CandidateList {
 public:
  struct Shared {
    alignas(16) uint32_t buckets[1][kRadixBuckets];
    alignas(16) uint4 overflow;  // x: whether a list was too short
    RadixGroup state;
    uint32_t floor;
    int left;
    int count;
    int word_count;
    uint32_t words[kListedWords];
    uint64_t candidates[kListed];
  };

  __device__ CandidateList(const Team& team, const Candidates& from, int size, Shared& shared)
      : team_(team),
        from_(from),
        size_(size),
        shared_(shared),
        digits_(team, 1, size, shared.buckets, &shared.state),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {}

  // Lists all candidates that can be among the best `wanted`. Returns false if it cannot.
  __device__ bool fill(int wanted) {
    find_floor(wanted);
    if (shared_.floor == 0) return false;
    list_words();
    __syncthreads();
    list_candidates();
    __syncthreads();
    if (threadIdx.x == 0) shared_.overflow.x = shared_.word_count > kListedWords || shared_.count > kListed ? 1 : 0;
    team_.sync();
    uint32_t overflow = 0;
    if (lane_ < team_.ranks) overflow = team_.load(&shared_.overflow, lane_).x;
    return __all_sync(0xffffffffu, overflow == 0);
  }

  // Sets the bits of the best `wanted` candidates. The list must be complete.
  __device__ void take(int wanted, uint32_t* bits) {
    const int count = shared_.count;
    digits_.find_thresholds(wanted, [&](int shift) {
      const RadixGroup group = shared_.state;
      for (int i = static_cast<int>(threadIdx.x); i - lane_ < count; i += kSelectThreads) {
        const uint64_t own = i < count ? shared_.candidates[i] : 0;
        digits_.add(0, i < count && RadixDigits::begins_like(own, group, shift), static_cast<uint32_t>(own >> shift));
      }
    });
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kSelectThreads) {
      const int index = index_of_candidate(shared_.candidates[i], size_);
      if (shared_.candidates[i] >= shared_.state.threshold) atomicOr(bits + index / 32, 1u << index % 32);
    }
    team_.sync();
  }

 private:
  static constexpr int kBatch = 4;  // loads that are started before the first is used

  // Finds the floor: the upper half of an order that the best candidates of at least `wanted` words reach. At least
  // `wanted` candidates then reach it. The floor is 0 if too few words have candidates.
  __device__ void find_floor(int wanted) {
    if (threadIdx.x == 0) {
      shared_.floor = 0;
      shared_.left = wanted;
      shared_.count = shared_.word_count = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int shift = 24; shift >= 16; shift -= 8) {
      const uint32_t floor = shared_.floor;
      digits_.count_digits([&] {
        for_each_best([&](int, uint32_t best, bool is_free) {
          digits_.add(0, is_free && best != 0 && (shift == 24 || (best ^ floor) >> 24 == 0), best >> shift);
        });
      });
      if (warp_ == 0) {
        const int left = shared_.left;
        __syncwarp();
        const int all = digits_.find_bucket(left, [&](int bucket, int above, int) {
          shared_.floor = floor | static_cast<uint32_t>(bucket) << shift;
          shared_.left = left - above;
        });
        if (all < left && lane_ == 0) shared_.left = 0;
      }
      team_.sync();
    }
  }

  __device__ void list_words() {
    const uint32_t floor = shared_.floor;
    for_each_best([&](int word, uint32_t best, bool) {
      const int place = append(best >= floor, shared_.word_count);
      if (best >= floor && place < kListedWords) shared_.words[place] = static_cast<uint32_t>(word);
    });
  }

  __device__ void list_candidates() {
    const uint32_t floor = shared_.floor;
    const int words = min(shared_.word_count, kListedWords);
    for (int first = warp_; first < words; first += kSelectWarps * kBatch) {
      uint32_t orders[kBatch];
      int indices[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int word = static_cast<int>(shared_.words[min(first + i * kSelectWarps, words - 1)]);
        indices[i] = RadixShare::index_of(word);
        const uint32_t taken = from_.taken == nullptr ? 0 : read_word(from_.taken, word);
        const bool free = indices[i] < size_ && (taken >> lane_ & 1) == 0;
        orders[i] = free ? __ldcg(from_.orders + indices[i]) : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool lists = first + i * kSelectWarps < words && orders[i] >= floor;
        const int place = append(lists, shared_.count);
        if (lists && place < kListed) shared_.candidates[place] = candidate(orders[i], indices[i], size_);
      }
    }
  }

  // Calls body(word, best, is_free) for this thread block's words, each in one lane. `best` is 0 in a lane without a
  // word. If `is_free`, no candidate of the word is taken, so `best` is itself a candidate.
  template <class Body>
  __device__ void for_each_best(Body body) const {
    const int words = (size_ + 31) / 32;
    for (int first = team_.thread(); first - lane_ < words; first += team_.threads() * kBatch) {
      uint32_t best[kBatch];
      uint32_t taken[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int word = min(first + i * team_.threads(), words - 1);
        best[i] = __ldcg(from_.best + word);
        taken[i] = from_.taken == nullptr ? 0 : read_word(from_.taken, word);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int word = first + i * team_.threads();
        body(word, word < words ? best[i] : 0, taken[i] == 0);
      }
    }
  }

  // If this lane `adds` an element, returns its index in the list and counts it.
  __device__ int append(bool adds, int& count) const {
    const unsigned all = __ballot_sync(0xffffffffu, adds);
    int before = 0;
    if (lane_ == 0 && all != 0) before = atomicAdd(&count, __popc(all));
    return __shfl_sync(0xffffffffu, before, 0) + __popc(all & ((1u << lane_) - 1));
  }

  const Team team_;
  const Candidates from_;
  const int size_;
  Shared& shared_;
  RadixDigits digits_;
  const int lane_;
  const int warp_;
};

// Returns false, with no bit set, if the candidates cannot be listed.
__device__ __noinline__ bool take_best_listed(Team team, int size, int wanted, Candidates from, uint32_t* bits) {
  __shared__ CandidateList::Shared shared;
  CandidateList list(team, from, size, shared);
  if (!list.fill(wanted)) return false;
  list.take(wanted, bits);
  return true;
}

// Does what take_best_of_all does, with a list if that pays.
__device__ inline int take_best(Team team, RadixGroups groups, int wanted, Candidates from, uint32_t* bits) {
  const bool few = from.best != nullptr && groups.of == 1 && groups.size / kListWorth >= wanted;
  if (few && take_best_listed(team, groups.size, wanted, from, bits)) return wanted;
  return take_best_of_all(team, groups, wanted, from, bits);
}

}  // namespace kv
