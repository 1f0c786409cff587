// Which kernel a CUDA device computes block-sparse attention with.
#include "kernels/block-sparse-attention/block-sparse-attention.cuda.h"
#include "shared/attention/any-shape/attention.cuda.h"
#include "shared/attention/key-block-lists.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-attention.cuda.h"

namespace kv {

Status block_sparse_attention_cuda(const BlockSparseAttentionArguments& given, ExecutionContext& context) {
  if (given.batch == 0 || given.query_tokens == 0) return Status::success();
  int major = 0;
  Status status = find_compute_capability(major);
  if (!status.ok()) return status;
  const size_t tables_bytes = checked_tables_bytes(given);
  const size_t lists_bytes = checked_lists_bytes(given, given.lists);
  const size_t plan_bytes = listed_plan_bytes(given);
  auto* memory = static_cast<char*>(
      context.workspace(tables_bytes + lists_bytes + plan_bytes + kBlockSparseAttentionWorkspaceBytes));
  if (memory == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for block-sparse attention's workspace");
  }
  const CheckedTables tables(given, memory);
  status = check_tables_cuda(given, tables, context);
  if (!status.ok()) return status;
  BlockSparseAttentionArguments arguments = with_tables(given, tables);
  memory += tables_bytes;
  status = check_lists_cuda(arguments, memory, context, &arguments.lists);
  if (!status.ok()) return status;

  const bool ampere_or_ada = major == 8 && fits_tensor_cores(arguments, 1);
  const bool hopper = major == 9 && fits_tensor_cores(arguments, kBlockSparseBlockMultiple);
  if (!ampere_or_ada && !hopper) return attention_any_cuda(arguments, context, arguments.lists);
  memory += lists_bytes;
  ListedPlan plan;
  status = plan_listed_tiles(arguments, memory, stream_of(context), &plan);
  if (!status.ok()) return status;
  if (ampere_or_ada) return sm80::block_sparse_attention(arguments, plan, stream_of(context));
  return sm90a::block_sparse_attention(arguments, plan, memory + plan_bytes, stream_of(context));
}

}  // namespace kv
