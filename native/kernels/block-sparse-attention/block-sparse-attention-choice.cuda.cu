// Which kernel a CUDA device computes block-sparse attention with.
#include "kernels/block-sparse-attention/block-sparse-attention.h"
#include "shared/attention/any-shape/attention.cuda.h"
#include "shared/attention/key-block-lists.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-attention.cuda.h"
#include "runtime/device.h"

namespace kv {

Status block_sparse_attention_cuda(const BlockSparseAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  const size_t tables_bytes = checked_tables_bytes(given);
  const size_t lists_bytes = checked_lists_bytes(given, given.lists);
  auto* memory = static_cast<char*>(context.queue->workspace(tables_bytes + lists_bytes));
  if (memory == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for block-sparse attention's workspace");
  }
  const CheckedTables tables(given, memory);
  Status status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  BlockSparseAttentionArguments arguments = with_tables(given, tables);
  status = check_lists_cuda(arguments, memory + tables_bytes, context, &arguments.lists);
  if (!status.ok()) return status;
  return attention_any_cuda(arguments, context, arguments.lists);
}

}  // namespace kv
