// Chooses the tokens that a cache keeps, from a score for each token (HBW-KV Eq. 5 to 7 and section 3.2.3). A row is
// one kv head of one batch entry. Let P = prefix_tokens, and k = capacity - window_tokens, at least 0 and at most P.
// For each row:
//   1. If pooling is asked for, scores are pooled over their neighbours in the prefix.
//   2. The first min(k, sink_tokens) tokens are kept. The next steps choose among the other tokens of the prefix; k
//      shrinks by the tokens already kept. Positions count from the first of these other tokens. If k covers all of
//      them, all are kept.
//   3. The tokens are cut into blocks of T = min(block_tokens, k) tokens; the last block may be shorter. A block's
//      score is the mean over its true length.
//   4. min(k / T, blocks) blocks are divided equally over the rounds. Blocks that are left over go to the first
//      rounds. A round has M groups, at most one for each of the B blocks. Group g has the blocks from g B / M up to
//      (g + 1) B / M. The round takes from every group its best (blocks of the round) / M. The rest of the round are
//      the best blocks left, at most one more of each group. If groups are exhausted, it takes the best blocks left
//      anywhere. What a round cannot place goes to the next round.
//   5. With fill, the best single tokens that are left are kept until there are exactly k.
//   6. The window, the tokens P .. P + window_tokens - 1, is kept.
// Better means a higher score, and of equal scores the lower index. NaN counts as minus infinity.
//
// Every device must select the same tokens. Pooled sums are therefore added in ascending order in f32. The sum of a
// block is in f64, and its mean is rounded to f32. small-scores.h says what scores and sums too small for f32 mean.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/status.h"

namespace kv {

// How the `pool_tokens` scores around a token are pooled, like PyTorch with stride 1 and padding pool_tokens / 2.
enum class ScorePooling : int32_t {
  none,
  average,  // neighbours outside the prefix count as zeros; not divided, since a common divisor changes no order
  maximum,
};

// The selection for one kv head of one batch entry.
struct SelectTokensRow {
  int32_t prefix_tokens;  // tokens that have scores, 0 to score_tokens
  int32_t window_tokens;  // tokens after the prefix, which are always kept
  int32_t capacity;       // tokens to keep, window and sinks included; a larger window is kept in full
  int32_t block_tokens;   // positive
};

struct SelectTokensArguments {
  static constexpr int32_t kMaxRounds = 16;

  const float* scores = nullptr;  // [batch, kv_head, score_tokens] contiguous
  int32_t score_tokens = 0;
  const SelectTokensRow* rows = nullptr;  // [batch, kv_head] contiguous, in the same memory as the scores
  int32_t row_count = 0;                  // batch times kv heads

  // The number of groups of each round.
  int32_t rounds[kMaxRounds] = {};
  int32_t round_count = 0;
  // Whether a round may choose blocks that an earlier round has chosen. The kept blocks are then the union of what
  // each round would choose alone, and may be fewer.
  bool overlapping_rounds = false;
  // Whether single tokens are kept too, if whole blocks do not make up k.
  bool fill = true;
  int32_t sink_tokens = 0;
  ScorePooling pooling = ScorePooling::none;
  int32_t pool_tokens = 1;  // odd

  // [batch, kv_head, index_tokens] contiguous. The first counts[batch, kv_head] elements of each row are positions in
  // ascending order. With fill, a row keeps exactly min(prefix_tokens + window_tokens, max(capacity, window_tokens))
  // tokens, without fill at most that many. index_tokens is at least this number for every row.
  int32_t* indices = nullptr;
  int32_t index_tokens = 0;
  int32_t* counts = nullptr;
};

enum class SelectTokensFault : int32_t { impossible_row = 1 };  // limit: the indices that fit

std::string describe_select_tokens_fault(const Fault& fault);

// Refuses rows that contradict themselves or that do not fit (invalid_value).
Status select_tokens(const SelectTokensArguments& arguments, ExecutionContext& context);

}  // namespace kv
