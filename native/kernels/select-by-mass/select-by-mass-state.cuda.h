// What the kernels of select-by-mass know of heads and of lists, in working memory. Device code.
#pragma once

#include "kernels/select-by-mass/select-by-mass-threshold.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

using cuda::HeadSum;
using cuda::HeadWeights;
using cuda::kNoShareBelow;
using cuda::kShareBins;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kChunk = 8192;                   // tokens that a thread block has
constexpr int kSumTokens = 4 * kSumThreads;    // where it counts bins, a multiple of these
constexpr int kChunkWords = kChunk / kWarp;
constexpr int kListed = 8192;  // candidates of a head that are listed

static __device__ const cuda::BinFactors kFactors{};

// All numbers of kNoShareBelow and above have places behind the last one with a share.
__device__ inline uint32_t fixed_of(float below) { return __float2uint_rz(below * 0x1p27f); }

__device__ inline uint64_t share_below(float below) {
  if (!(below < kNoShareBelow)) return 0;
  const uint32_t fixed = cuda::fixed_below(below);
  const uint32_t factor = __ldg(kFactors.of + cuda::bin_of(fixed));
  return cuda::share(cuda::share_bits(fixed, factor), factor & 0xff);
}

// NaN gets an order above that of infinity.
__device__ inline uint32_t score_order(float score) {
  return isnan(score) ? UINT32_MAX : cuda::order_of(__float_as_uint(score + 0.0f));
}

// ---- What is known of heads and lists ----

struct HeadState {
  OrderRange scores;
  HeadSum sum;
  float log_of_all;
  Cut cut;
  // Scores from `above` on are taken, and those from `in_bin` on are candidates. NaN where there are none.
  float above;
  float in_bin;
  // A bin that holds too many candidates is counted in narrower ones: 2^`wide` numbers fixed_below() from `from` on.
  uint32_t from;
  int32_t wide;  // 0 where this is not so
  unsigned long long taken;  // share of the taken tokens
  HeadWeights made;
};

struct ListState {
  int32_t slot;  // -1 for a row that no batch entry has
  int32_t tokens;
  Cut cut;  // by the largest share of each token; its bin is kBins where there is room for all
};

struct Memory {
  uint64_t* bins;          // [row, query_head, kBins]
  uint64_t* keys;          // [row, query_head, kListed]
  HeadState* heads;        // [row, query_head]
  ListState* lists;        // [row, kv_head]
  uint32_t* head_words;    // [row, query_head, chunks * kChunkWords]: a bit for each token that the head takes
  uint32_t* words;         // [row, kv_head, chunks * kChunkWords]: and for each token of the list
  int32_t* chunk_counts;   // [row, kv_head, chunks]: tokens of the list in each chunk
  uint64_t* list_bins;     // [row, kv_head, kBins], where lists may be cut
  uint16_t* best_bins;     // [row, kv_head, chunks * kChunk], there: the bin of a token's largest share
};

struct Launch {
  SelectByMassArguments a;
  Memory memory;
  FaultSink faults;
  int chunks;      // of score_tokens
  int sum_blocks;   // thread blocks that count the bins of a head
  int best_blocks;  // and of a list
  int head_team;   // thread blocks that search a head's candidates where these are too many to be listed
  int list_team;   // and those of a list that is cut
  bool aligned;    // four scores may be loaded at once
};

// What a row's list has, by its batch entry; -1 where no entry has the row.
__device__ ListState list_of(const Launch& launch, int64_t list, int entry, bool ascends, bool known) {
  const SelectByMassArguments& a = launch.a;
  ListState state{-1, 0, {}};
  state.cut.bin = kBins;  // no list is cut yet
  if (!ascends) {
    report_fault(launch.faults, PagedFault::rows_not_ascending, 0, 0, a.query_tokens);
  } else if (!known) {
    report_fault(launch.faults, PagedFault::slot_out_of_range, a.slots[0], 0, a.slot_count);
  } else if (entry >= 0) {
    state.slot = a.slots[entry];
    state.tokens = a.key_counts[int64_t{state.slot} * a.kv_heads + list % a.kv_heads];
    if (state.tokens < 0 || state.tokens > int64_t{a.table_width} * kValueBlockTokens) {
      report_fault(launch.faults, PagedFault::cache_overflow, state.slot);
      state.tokens = 0;
    } else if (state.tokens > a.score_tokens) {
      report_fault(launch.faults, SelectByMassFault::too_many_keys, state.slot, list / a.kv_heads, a.score_tokens);
      state.tokens = 0;
    }
  }
  return state;
}

// Every other kernel begins at the end, where the one ahead of it has left scores in the L2.
__device__ inline unsigned block_from_end() { return gridDim.x - 1 - blockIdx.x; }

// Tokens of each of some thread blocks that count bins.
__device__ inline int tokens_of_block(int tokens, int blocks) {
  return ((tokens + blocks - 1) / blocks + kSumTokens - 1) / kSumTokens * kSumTokens;
}

// A thread block's part of a row and query head.
struct HeadChunk {
  const SelectByMassArguments& a;
  int64_t row_head;
  int first;  // token
  int end;
  const float* scores;
  HeadState& head;

  __device__ HeadChunk(const Launch& launch, unsigned block)
      : a(launch.a),
        row_head(block / launch.sum_blocks),
        scores(a.scores + row_head * a.score_tokens),
        head(launch.memory.heads[row_head]) {
    const int tokens = launch.memory.lists[row_head / a.group()].tokens;
    const int own = tokens_of_block(tokens, launch.sum_blocks);
    first = static_cast<int>(block % launch.sum_blocks) * own;
    end = min(first + own, tokens);
  }

  // Calls body(four scores) in whole warps of kSumThreads. Behind the last score is `behind`.
  template <class Body>
  __device__ void for_each_four(bool aligned, float behind, Body body) const {
    constexpr int kBatch = 4;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    int at = first + 4 * (static_cast<int>(threadIdx.x) - lane);  // of the warp
    if (aligned) {
#pragma unroll 1
      for (; at + (kBatch - 1) * kSumTokens + 4 * kWarp <= end; at += kBatch * kSumTokens) {
        float4 own[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) own[i] = *reinterpret_cast<const float4*>(scores + at + 4 * lane + i * kSumTokens);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) body(own[i]);
      }
    }
#pragma unroll 1
    for (; at < end; at += kSumTokens) {
      const auto score = [&](int i) { return at + 4 * lane + i < end ? scores[at + 4 * lane + i] : behind; };
      body(make_float4(score(0), score(1), score(2), score(3)));
    }
  }
};

// A row and kv head.
struct List {
  const Launch& launch;
  const SelectByMassArguments& a;
  int64_t index;
  ListState& state;
  HeadState* heads;
  const float* scores;

  __device__ List(const Launch& given, int64_t row_list)
      : launch(given),
        a(given.a),
        index(row_list),
        state(given.memory.lists[row_list]),
        heads(given.memory.heads + row_list * a.group()),
        scores(a.scores + row_list * a.group() * a.score_tokens) {}

  __device__ uint32_t* head_words(int head) const {
    return launch.memory.head_words + (index * a.group() + head) * launch.chunks * kChunkWords;
  }
  __device__ uint32_t* words() const { return launch.memory.words + index * launch.chunks * kChunkWords; }
  __device__ int32_t* chunk_counts() const { return launch.memory.chunk_counts + index * launch.chunks; }
  __device__ float score(int head, int token) const { return scores[int64_t{head} * a.score_tokens + token]; }
  __device__ bool takes(int head, int token) const {
    return (__ldcg(head_words(head) + token / kWarp) >> token % kWarp & 1) != 0;
  }
  // Shares of tokens, 0 where the head did not take it or the token is negative. All loads of a kind are on their way together.
  template <int kCount>
  __device__ void taken_shares(const int (&head)[kCount], const int (&token)[kCount], uint64_t (&shares)[kCount]) const {
    bool taken[kCount];
    float below[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) taken[i] = token[i] >= 0 && takes(head[i], token[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) below[i] = taken[i] ? heads[head[i]].sum.most - score(head[i], token[i]) : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) shares[i] = taken[i] ? share_below(below[i]) : 0;
  }
  __device__ uint64_t* bins() const { return launch.memory.list_bins + index * kBins; }
  __device__ uint16_t* best_bins() const { return launch.memory.best_bins + index * launch.chunks * kChunk; }
  // The keys of its heads have been used when those of its tokens are listed.
  __device__ uint64_t* keys() const { return launch.memory.keys + index * a.group() * kListed; }
  __device__ unsigned most_listed() const { return static_cast<unsigned>(a.group()) * kListed; }
  // The order of a token's largest share of a head's softmax, of those heads that take it.
  __device__ uint32_t best_order(int token) const {
    uint32_t best = 0;
#pragma unroll 4
    for (int h = 0; h < a.group(); ++h) {
      if (takes(h, token)) best = max(best, score_order(score(h, token) - heads[h].log_of_all));
    }
    return best;
  }
};

// Four scores from `token` on, with minus infinity behind the last.
__device__ inline float4 four_scores(const float* scores, int token, int end, bool aligned) {
  if (aligned && token + 4 <= end) return __ldg(reinterpret_cast<const float4*>(scores + token));
  const auto score = [&](int i) { return token + i < end ? scores[token + i] : -INFINITY; };
  return make_float4(score(0), score(1), score(2), score(3));
}

}  // namespace kv
