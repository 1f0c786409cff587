// Chooses the next token of each row from its logits. It applies repetition penalty, temperature, top-k, top-p and
// min-p in this order, like the `transformers` library, and then draws with a seed. With temperature 0 it takes the
// greatest logit. Candidates are ordered by higher score, then lower index, so that ties have one answer.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/status.h"

namespace kv {

// How one row is sampled. The same settings and logits give the same token, whatever the other rows contain.
struct SampleSettings {
  float temperature = 1;         // 0 takes the greatest score
  int64_t top_k = 0;             // candidates to keep; 0 keeps all
  double top_p = 1;              // candidates are kept while the weight of those before them is less than this
  double min_p = 0;              // the least weight to keep, as a fraction of the greatest
  float repetition_penalty = 1;  // divides positive logits of recent tokens and multiplies negative ones
  uint64_t seed = 0;
  uint64_t step = 0;  // must differ for every draw of one seed
};

// The values of `outcomes`.
enum class SampleFault : int32_t { none, unordered_logit, no_finite_logit, recent_outside };

std::string describe_sample_fault(const Fault& fault);

struct SampleOutcome {
  SampleFault fault = SampleFault::none;
  int64_t subject = 0;  // index of the wrong logit, or the recent token
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
  int32_t* outcomes = nullptr;               // [row], a SampleFault for each row; if null, a fault fails the stream
  SampleOutcome* details = nullptr;          // [row], written by the CPU kernel; `sample` sets it
};

// A row has no token if its logits hold NaN or +infinity or nothing finite, or if a recent token is not in the
// vocabulary. With `outcomes`, its output is then -1, and other rows do not change. Without `outcomes`, invalid_value
// names such a row, on the CPU the first, and the output is unspecified.
Status sample(const SampleArguments& arguments, ExecutionContext& context);

}  // namespace kv
