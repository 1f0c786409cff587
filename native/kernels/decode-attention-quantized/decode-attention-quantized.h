// Attention of one new token (or a few) per batch entry over quantized blocks (shared/quantized-blocks), with no causal
// limit: all tokens of the blocks come before the rows. With q' and o' for rotated rows, k and v for what the codes of
// keys and values stand for:
//   o' = sum_j softmax_j(scale q' . k_j) v_j,   o = s * (H o') / sqrt(n).
// Queries are rotated once, and outputs are rotated back once. Reading the codes takes most of the time.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Keys and values are pools u8 [quantized_block, byte] of `block_count` blocks each, and a block has the same number in
// both. The table names quantized blocks. Key counts are multiples of 64. What else the arguments say of pools, and
// `causal`, has no meaning.
struct QuantizedAttentionArguments : PagedAttentionArguments {
  int32_t key_bits = 8;  // of a code: 8 or 4
  int32_t value_bits = 8;
  // Output and log_sum_exp hold attention of the rows over other keys, which becomes that over all.
  bool merge = false;
};

// Refuses sizes, dtypes and tables that contradict each other (invalid_value, capability).
Status decode_attention_quantized(const QuantizedAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
