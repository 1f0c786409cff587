// Shared by the CUDA kernels of observation scores: which keys the rows of a kv head see, and where a row's softmax
// statistics lie. Device code.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/observation-scores/observation-scores.cuda.h"
#include "runtime/fault.h"
#include "shared/scores/small-scores.h"

namespace kv {

// One kv head of one batch entry.
struct ObservedHead {
  int kv_head;
  const int32_t* blocks;
  int first_token;  // index of the first query's row in `query`
  int queries;
  int key_count;
  int prefix;       // keys that get a score
  int seen_keys;    // keys that the last query sees
  float* scores;

  __device__ ObservedHead(const ObservationScoresArguments& a, int index) : kv_head(index % a.kv_heads) {
    const int entry = index / a.kv_heads;
    const int64_t cache_head = int64_t{a.slots[entry]} * a.kv_heads + kv_head;
    blocks = a.block_table + cache_head * a.table_width;
    first_token = a.query_start[entry];
    queries = a.query_start[entry + 1] - first_token;
    key_count = a.key_counts[cache_head];
    prefix = max(0, key_count - queries);
    causal_ = a.domain == ScoreDomain::full;
    seen_keys = causal_ ? key_count : prefix;
    scores = a.scores + int64_t{index} * a.score_tokens;
  }

  // How many of the first keys are in the denominator of query i.
  __device__ int visible(int query) const { return causal_ ? max(0, key_count - queries + query + 1) : prefix; }

 private:
  bool causal_;
};

// Must be called by one thread.
__device__ inline void check_room(const ObservationScoresArguments& a, const ObservationScoresLaunch& launch,
                                  const ObservedHead& head) {
  if (head.prefix <= a.score_tokens) return;
  report_fault(launch.faults, ObservationScoresFault::too_many_scores, head.prefix, head.kv_head, a.score_tokens);
}

// Part `part` of `parts` equal parts of a range of `things`.
struct PartOf {
  int begin;
  int end;

  __device__ PartOf(int things, int part, int parts)
      : begin(static_cast<int>(int64_t{things} * part / parts)),
        end(static_cast<int>(int64_t{things} * (part + 1) / parts)) {}
};

// The statistics of a row over the keys of one part.
__device__ inline RowStatistics& statistics_of(const ObservationScoresArguments& a,
                                               const ObservationScoresLaunch& launch, int part, int query_head,
                                               int token) {
  return launch.statistics[(int64_t{part} * a.query_heads + query_head) * a.query_tokens + token];
}

__device__ inline float& log_sum_of(const ObservationScoresArguments& a, const ObservationScoresLaunch& launch,
                                    int query_head, int token) {
  return launch.log_sums[int64_t{query_head} * a.query_tokens + token];
}

// The statistics of the keys of both. A reference of minus infinity adds nothing, unless its sum is NaN.
__device__ inline RowStatistics merged(RowStatistics a, RowStatistics b) {
  const float higher = fmaxf(a.reference, b.reference);
  const float offset = higher == -INFINITY ? 0.0f : higher;
  return {higher, a.sum * exp2f(a.reference - offset) + b.sum * exp2f(b.reference - offset)};
}

__device__ inline RowStatistics merged_across_warp(RowStatistics own) {
  for (int distance = 16; distance > 0; distance /= 2) {
    own = merged(own, {__shfl_xor_sync(0xffffffffu, own.reference, distance),
                       __shfl_xor_sync(0xffffffffu, own.sum, distance)});
  }
  return own;
}

// The score of sum * 2^reference. With a reference of minus infinity, the sum is 0.
__device__ inline float scaled_score(float sum, float reference) {
  const float whole = floorf(fmaxf(reference, -2e9f));
  return score_of(sum * exp2f(fmaxf(reference, whole) - whole), static_cast<int>(whole));
}

}  // namespace kv
