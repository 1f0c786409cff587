// Attention of a prompt, or of a chunk of one, in which each tile of query rows attends to the key blocks of a list:
//   output[i, h] = sum_j softmax_j(scale * query[i, h] . key[j]) value[j],
//   log_sum_exp[i, h] = log sum_j exp(scale * query[i, h] . key[j]),
// j over the keys that row i sees and that lie in a block listed for query head h and the tile of row i.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"
#include "shared/attention/key-block-lists.h"

namespace kv {

struct BlockSparseAttentionArguments : PagedAttentionArguments {
  KeyBlockLists lists;
};

// If the lists have all blocks, the result is that of prefill_attention, bit for bit. Refuses sizes, dtypes, tables
// and lists that contradict each other (invalid_value, capability).
Status block_sparse_attention(const BlockSparseAttentionArguments& arguments, ExecutionContext& context);

}  // namespace kv
