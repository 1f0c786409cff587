// Cross entropy: how unlikely the token was that came, in nats:
//   output[r] = ln sum_v exp(logits[r, v]) - logits[r, targets[r]]
#pragma once

#include <cstdint>

#include "runtime/execution.h"
#include "runtime/status.h"

namespace kv {

struct CrossEntropyArguments {
  const float* logits = nullptr;  // [row, vocabulary], rows row_stride elements apart
  int64_t row_stride = 0;
  const int32_t* targets = nullptr;  // [row], each less than vocabulary
  float* output = nullptr;           // [row]
  int64_t rows = 0;
  int64_t vocabulary = 0;
};

Status cross_entropy(const CrossEntropyArguments& arguments, ExecutionContext& context);

}  // namespace kv
