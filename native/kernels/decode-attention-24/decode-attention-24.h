// Attention of one new token (or a few) per batch entry over a cache of dense and 2:4 sparse blocks (HieraSparse,
// section IV-C). It computes what decode_attention computes from the cache as decompress-24 would write it. Reading
// the cache takes most of the time, and a sparse block has 9/16 of the bytes of a dense block.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

// Over dense blocks alone the result on the CPU is that of decode_attention, bit for bit. Refuses sizes, dtypes and
// tables that contradict each other (invalid_value, capability).
Status decode_attention_24(const Attention24Arguments& arguments, ExecutionContext& context);

}  // namespace kv
