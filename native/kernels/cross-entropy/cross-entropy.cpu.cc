#include "kernels/cross-entropy/cross-entropy.h"

#include <cmath>

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

float greatest(const float* row, int64_t length) {
  float result = row[0];
  int64_t i = 0;
  if (length >= kLanes) {
    Vec running = load(row);
    for (i = kLanes; i + kLanes <= length; i += kLanes) running = maximum(running, load(row + i));
    result = horizontal_maximum(running);
  }
  for (; i < length; ++i) result = row[i] > result ? row[i] : result;
  return result;
}

float log_sum_exp(const float* row, int64_t length) {
  const float shift = greatest(row, length);
  Vec total = {};
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) total += exponential(load(row + i) - splat(shift));
  float sum = horizontal_sum(total);
  for (; i < length; ++i) sum += std::exp(row[i] - shift);
  return shift + std::log(sum);
}

}  // namespace

void cross_entropy(const CrossEntropyArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.rows), [&](size_t row, int) {
    const float* logits = a.logits + static_cast<int64_t>(row) * a.row_stride;
    a.output[row] = log_sum_exp(logits, a.vocabulary) - logits[a.targets[row]];
  });
}

}  // namespace KV_ISA
}  // namespace kv
