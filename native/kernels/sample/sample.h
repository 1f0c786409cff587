// Chooses the next token of each row from its logits: repetition penalty, temperature, top-k, top-p and min-p
// in this order, as in the `transformers` library, then a seeded draw; or the greatest logit when the
// temperature is 0. Candidates are ordered by higher score, then lower index, so ties are settled everywhere.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/status.h"

namespace kv {

// How one row is sampled. The same settings and logits give the same token, whatever the other rows are.
struct SampleSettings {
  float temperature = 1;         // 0: the greatest score
  int64_t top_k = 0;             // candidates kept; 0: all
  double top_p = 1;              // candidates are kept while those before them hold less than this
  double min_p = 0;              // the least weight kept, as a fraction of the greatest
  float repetition_penalty = 1;  // divides the positive logits of recent tokens, multiplies the negative ones
  uint64_t seed = 0;
  uint64_t step = 0;  // every draw of one seed has its own
};

// As `outcomes` holds it.
enum class SampleFault : int32_t { none, unordered_logit, no_finite_logit, recent_outside };

std::string describe_sample_fault(const Fault& fault);

struct SampleOutcome {
  SampleFault fault = SampleFault::none;
  int64_t subject = 0;  // the index of the logit at fault, or the recent token
};

struct SampleArguments {
  const float* logits = nullptr;  // [row, vocabulary]; strides count elements, a row is contiguous
  int64_t logits_stride = 0;
  int64_t rows = 0;
  int64_t vocabulary = 0;
  const int32_t* recent = nullptr;  // [row, recent], padded with -1; null when no row has a penalty
  int64_t recent_stride = 0;
  int64_t recent_tokens = 0;
  const SampleSettings* settings = nullptr;  // [row]
  int32_t* output = nullptr;                 // [row]
  int32_t* outcomes = nullptr;               // [row], why a row has no token, a SampleFault; null: that fails the stream
  SampleOutcome* details = nullptr;          // [row], written by the CPU kernel; the shared entry gives it
};

// A row whose logits hold NaN or +infinity or nothing finite, or whose recent tokens lie outside the vocabulary, has no
// token: with `outcomes` its output is -1 and no other row's changes. Without, invalid_value names the first such row,
// and the output is unspecified.
Status sample(const SampleArguments& arguments, ExecutionContext& context);

}  // namespace kv
