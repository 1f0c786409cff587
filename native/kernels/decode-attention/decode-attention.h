// Attention of one new token (or a few) per batch entry over its whole cache. Reading the cache once takes most of
// the time. The keys of a sequence are cut into splits of fixed length, which workers share. The partial results are
// merged by their log-sum-exp (Dao et al. 2023, "Flash-Decoding"):
//   output = sum_s exp(l_s - l) output_s,   l = log sum_s exp(l_s).
// The length of a split does not depend on the number of workers, so the result does not either.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Computes what prefill_attention does. Refuses sizes, dtypes and tables that contradict each other
// (invalid_value, capability).
Status decode_attention(const PagedAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
