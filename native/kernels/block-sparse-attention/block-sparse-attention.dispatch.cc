#include "kernels/block-sparse-attention/block-sparse-attention.h"

#include "shared/attention/prefill/tiled-caches.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_TILED_CPU_KERNEL(block_sparse_attention, BlockSparseAttentionArguments)
KV_CUDA_KERNEL(block_sparse_attention, BlockSparseAttentionArguments)

Status block_sparse_attention(const BlockSparseAttentionArguments& arguments, ExecutionContext& context) {
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return block_sparse_attention_cuda(arguments, context);
  status = validate_tables(arguments, false);
  if (status.ok()) status = validate_key_block_lists(arguments, arguments.lists);
  if (!status.ok()) return status;
  block_sparse_attention_cpu(arguments, for_prefill(arguments, context));
  return Status::success();
}

}  // namespace kv
