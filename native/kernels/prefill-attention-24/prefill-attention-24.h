// Attention of a prompt, or of a chunk of one, over a cache of dense and 2:4 sparse blocks (HieraSparse, algorithm 1
// and section III-C2). It computes what prefill_attention computes from the cache as decompress-24 would write it. A
// sparse block takes half of the products of a dense one: S^T = K Q^T with K sparse, O^T = V^T P^T with V sparse.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// Over dense blocks alone the result on the CPU is that of prefill_attention, bit for bit. Refuses sizes, dtypes and
// tables that contradict each other (invalid_value, capability).
Status prefill_attention_24(const Attention24Arguments& arguments, ExecutionContext& context);

}  // namespace kv
