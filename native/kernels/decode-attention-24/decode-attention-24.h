// Attention of one new token (or a few) per batch entry over a cache of dense and 2:4 sparse blocks (HieraSparse,
// section IV-C): what decode_attention computes, of the cache as decompress-24 would write it out. Bound by
// reading the cache, of which a sparse block has 9/16 of a dense one's bytes.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// Over dense blocks alone the result is that of decode_attention, bit for bit, on the CPU. Refuses sizes, dtypes and
// tables that contradict each other (invalid_value, capability).
Status decode_attention_24(const Attention24Arguments& arguments, ExecutionContext& context);

}  // namespace kv
