// Scores of queries with keys in quantized blocks (shared/quantized-blocks): of every row and query head, and every key of
// the row's slot,
//   scores[row, head, token] = scale * q' . k
// with q' the rotated query, or the query as it is if blocks are plain, and k what the codes stand for. Sums are f32.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/key-scores/key-scores.h"

namespace kv {

struct QuantizedKeyScoresArguments : KeyScoresArguments {
  const uint8_t* keys = nullptr;  // [quantized_block, byte]
  int32_t key_bits = 8;           // or 4, 3, 2
  bool rotated = true;
};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status quantized_key_scores(const QuantizedKeyScoresArguments& arguments, ExecutionContext& context);

}  // namespace kv
