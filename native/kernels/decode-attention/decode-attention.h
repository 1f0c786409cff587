// Attention of one new token (or a few) per batch entry over its whole cache, bound by reading the cache
// once: the keys of a sequence are split into runs of fixed length that workers share, and the runs'
// results are merged by their log-sum-exp (Dao et al. 2023, "Flash-Decoding"):
//   output = sum_s exp(l_s - l) output_s,   l = log sum_s exp(l_s).
// The length of a run never depends on the worker count, so neither does the result.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Computes what prefill_attention does. Refuses sizes, dtypes and tables that contradict each other
// (invalid_value, capability).
Status decode_attention(const PagedAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
