// How much attention the last queries of a prompt give to each key before them (HBW-KV Eq. 3 and 4, after SnapKV).
// For kv head g and its key j, with the query heads h that read g and the queries w of the observation window:
//   weight[h, w, j] = exp(scale q[h, w] . k[g, j]) / sum_i exp(scale q[h, w] . k[g, i])
//   score[g, j]     = reduction over h of sum_w weight[h, w, j]
// small-scores.h says how a score below 2^-126 is written.
//
// The softmax is computed in f32, in two passes over the keys: first the denominators, then the sums of weights.
// Working memory grows with the number of keys, never with queries times keys.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"

namespace kv {

// Which keys i are in a query's denominator. The window's own keys are the last of a head, as many as there are
// queries. The prefix is all keys before them.
enum class ScoreDomain : int32_t {
  full,    // the prefix, and in the window the query's own key and those before it (SnapKV)
  prefix,  // only the prefix (HBW-KV Eq. 3 as written)
};

// The reduction over the query heads that read one kv head.
enum class GroupReduction : int32_t { mean, maximum, sum };

// The rows of batch entry b are the observation window of slot slots[b]: the slot's last queries, in order.
// key_counts include the window's own keys. Heads may have different counts.
struct ObservationScoresArguments : PagedBatch {
  // [token, query_head, dim]. Strides count elements; dim is contiguous.
  const void* query = nullptr;
  int64_t query_token_stride = 0;
  int64_t query_head_stride = 0;
  DType query_dtype = DType::f32;
  int32_t query_heads = 0;  // a multiple of kv_heads; query head h reads kv head h / (query_heads / kv_heads)

  const void* keys = nullptr;  // the pool
  float scale = 1.0f;          // positive
  ScoreDomain domain = ScoreDomain::full;
  GroupReduction reduction = GroupReduction::mean;

  // [batch, kv_head, score_tokens] contiguous. The first prefix(b, g) elements of each row are written, with
  //   prefix(b, g) = max(0, key_counts[slots[b], g] - rows of b),
  // which must be at most score_tokens. For an entry without rows they are all zero.
  float* scores = nullptr;
  int32_t score_tokens = 0;
};

enum class ObservationScoresFault : int32_t {
  // value: the keys before the window; row: the kv head
  too_many_scores = static_cast<int32_t>(PagedFault::operations_own),
};

std::string describe_observation_scores_fault(const Fault& fault);

// Refuses sizes, dtypes and tables that contradict each other, and a prefix longer than score_tokens (invalid_value,
// capability).
Status observation_scores(const ObservationScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
