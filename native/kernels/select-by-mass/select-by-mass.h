// Chooses the tokens whose values are worth reading, from the scores of all of them (HCAttention Eq. 3 and 4). With s_j
// the scores of one row and query head, and d the logarithm of the softmax's denominator over keys that are elsewhere
// and are read anyway:
//   1. The head takes the fewest tokens, by descending score, of equal scores the lower index, with
//      e^d + (sum of e^s_j over the taken) >= tau (e^d + sum of e^s_j over all).
//   2. A kv head's list is the union of its query heads' tokens. If there is no room for all, those stay whose largest
//      share of a head's softmax is largest; of equal ones the lower index.
//   3. Each token gets a weight for each query head, 0 where the head did not take it.
// Sums are of integers, the same on every device and in any order (select-by-mass-shares.h). A token whose score lies
// 26 or more below the largest one counts as nothing and is never taken: it has less than 6e-12 of that one's share.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"

namespace kv {

constexpr int32_t kValueBlockTokens = 64;
constexpr int32_t kMostScoredTokens = 1 << 24;

// What becomes of the share of tokens that a head did not take.
enum class MissingMass : int32_t {
  renormalise,  // weights sum to 1 over the taken
  paper,        // weights are shares of all tokens, and what is missing counts as zero
  mean_value,   // as `paper`, and what is missing is the weight of a row with the mean value
};

// Of the batch, `query_tokens` rows attend, and the tables name blocks of values. What it says of a pool's elements has
// no meaning.
struct SelectByMassArguments : PagedBatch {
  const float* scores = nullptr;                // [row, query_head, score_tokens]
  int32_t score_tokens = 0;                     // at least the keys of each row's slot, at most kMostScoredTokens
  const float* ranges = nullptr;                // [row, query_head, range_parts, 2], or null: as coded_key_scores writes them
  int32_t range_parts = 0;                      // at least 1 where there are ranges
  int32_t query_heads = 0;                      // a multiple of kv_heads
  const float* dense_log_sum_exp = nullptr;     // [row, query_head]: d; or null, for minus infinity
  const uint16_t* value_scales = nullptr;       // bf16 [value_block, 64], or null: weights are multiplied by them
  const int32_t* mean_rows = nullptr;           // [slot, kv_head], for mean_value: the row with the mean value
  double tau = 1;                               // above 0, at most 1, which takes all
  MissingMass missing = MissingMass::renormalise;

  // The lists, in memory of the device or of the host. Row 64 b + t of the pool of values is token t of block b. Rows
  // that no batch entry has get a count of 0.
  int32_t* value_rows = nullptr;  // [row, kv_head, capacity], tokens ascending; behind them the mean value's row
  float* weights = nullptr;       // [row, kv_head, capacity, group_head], or null: lists alone
  int32_t* counts = nullptr;      // [row, kv_head]
  int32_t capacity = 0;           // at least 1
  // [row, query_head], in the device's memory: the logarithm of the denominator that the weights were divided by.
  // Minus infinity without tokens. NaN where a score or d is NaN or plus infinity; such a head takes none.
  float* log_sum_exp = nullptr;

  constexpr int32_t group() const { return query_heads / kv_heads; }
  // Tokens that a list has room for.
  constexpr int32_t most_tokens() const { return missing == MissingMass::mean_value ? capacity - 1 : capacity; }
};

enum class SelectByMassFault : int32_t {
  too_many_keys = static_cast<int32_t>(PagedFault::operations_own),  // value: the slot; limit: tokens with scores
  mean_out_of_range,                                                // value: the row; limit: rows of the pool
};

std::string describe_select_by_mass_fault(const Fault& fault);

// Refuses sizes, tables and settings that contradict each other (invalid_value, capability).
Status select_by_mass(const SelectByMassArguments& arguments, ExecutionContext& context);

}  // namespace kv
