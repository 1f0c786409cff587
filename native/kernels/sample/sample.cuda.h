// What the CUDA kernels that choose tokens share.
#pragma once

#include "kernels/sample/sample.h"

namespace kv {

// Takes the greatest logit of every row, the first of equals, whatever the settings are.
Status sample_greedily(const SampleArguments& arguments, ExecutionContext& context);

#ifdef __CUDACC__
// An unsigned integer that is greater for a greater score. Both zeros give the same number.
__device__ inline uint32_t ordered_bits(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// One thread says why a row has no token.
__device__ inline void refuse_row(const SampleArguments& a, FaultSink faults, SampleFault fault, int64_t subject, int64_t row) {
  if (a.outcomes == nullptr) {
    report_fault(faults, fault, subject, row, a.vocabulary);
  } else {
    a.outcomes[row] = static_cast<int32_t>(fault);
  }
}

// The output of a row that gets no token. Work that is enqueued after this may read it before the host knows.
__device__ inline void begin_row(const SampleArguments& a, int64_t row) {
  a.output[row] = a.outcomes == nullptr ? 0 : -1;
  if (a.outcomes != nullptr) a.outcomes[row] = static_cast<int32_t>(SampleFault::none);
}
#endif

}  // namespace kv
