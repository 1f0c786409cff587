// Chooses the tokens that a cache keeps, from a score for each (HBW-KV Eq. 5 to 7 and section 3.2.3). For
// each row, which is one kv head of one batch entry, with P = prefix_tokens and k = capacity - window_tokens,
// at least 0 and at most P:
//   1. Scores are pooled over their neighbours in the prefix, if pooling is asked for.
//   2. The first min(k, sink_tokens) tokens are kept. What follows is about the other tokens of the prefix
//      and what is left of k; positions count from the first of them. If k reaches all of them, all are kept.
//   3. Blocks of T = min(block_tokens, k) tokens; the last block may be shorter. A block's score is the mean
//      over its true length.
//   4. min(k / T, blocks) blocks are divided over the rounds, equally, those left over going to the first
//      rounds. A round of M groups (at most one a block), of which group g has the blocks from g B / M up to
//      (g + 1) B / M of B, takes from every group its best (blocks of the round) / M; the rest are the best
//      blocks left, at most one more a group, and then, where groups are exhausted, the best anywhere. What a
//      round cannot place goes to the next.
//   5. With fill, the best single tokens that are left make up k exactly.
//   6. The window, the tokens P .. P + window_tokens - 1, is kept.
// Better means a higher score, and of equal scores the lower index. NaN counts as minus infinity.
//
// So that every device selects the same: pooled sums are added in ascending order in f32, and a block's sum
// in f64, whose mean is rounded to f32. Scores and sums too small for f32 are what small-scores.h says.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/status.h"

namespace kv {

// Over the `pool_tokens` scores around a token, as PyTorch pools with stride 1 and padding pool_tokens / 2.
enum class ScorePooling : int32_t {
  none,
  average,  // neighbours outside the prefix count as zeros; the common divisor orders nothing and is left out
  maximum,
};

// What is asked of one kv head of one batch entry.
struct SelectTokensRow {
  int32_t prefix_tokens;  // that have scores, 0 to score_tokens
  int32_t window_tokens;  // behind the prefix, always kept
  int32_t capacity;       // tokens to keep, window and sinks included; a larger window is kept all the same
  int32_t block_tokens;   // positive
};

struct SelectTokensArguments {
  static constexpr int32_t kMaxRounds = 16;

  const float* scores = nullptr;  // [batch, kv_head, score_tokens] contiguous
  int32_t score_tokens = 0;
  const SelectTokensRow* rows = nullptr;  // [batch, kv_head] contiguous, where the scores are
  int32_t row_count = 0;                  // batch times kv heads

  // Groups of each round.
  int32_t rounds[kMaxRounds] = {};
  int32_t round_count = 0;
  // Whether a round may choose blocks that an earlier one has: the kept blocks are then the union of what
  // each round would choose alone (and fewer).
  bool overlapping_rounds = false;
  // Whether single tokens make up what whole blocks leave of k.
  bool fill = true;
  int32_t sink_tokens = 0;
  ScorePooling pooling = ScorePooling::none;
  int32_t pool_tokens = 1;  // odd

  // [batch, kv_head, index_tokens] contiguous: positions in ascending order, the first counts[batch, kv_head]
  // of each row. A row keeps min(prefix_tokens + window_tokens, max(capacity, window_tokens)) tokens, exactly
  // with fill and at most without; index_tokens is at least that of every row.
  int32_t* indices = nullptr;
  int32_t index_tokens = 0;
  int32_t* counts = nullptr;
};

enum class SelectTokensFault : int32_t { impossible_row = 1 };  // limit: the indices that there is room for

std::string describe_select_tokens_fault(const Fault& fault);

// Refuses rows that contradict themselves or do not fit (invalid_value).
Status select_tokens(const SelectTokensArguments& arguments, ExecutionContext& context);

}  // namespace kv
