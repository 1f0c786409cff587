// Dense attention of a prompt, or of a chunk of one whose earlier keys are in the cache (FlashAttention-2, Dao 2023,
// algorithm 1; grouped queries as in Ainslie et al. 2023):
//   output[i, h] = sum_j softmax_j(scale * query[i, h] . key[j]) value[j],  j over the visible keys,
//   log_sum_exp[i, h] = log sum_j exp(scale * query[i, h] . key[j]).
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status prefill_attention(const PagedAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
