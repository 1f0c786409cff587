#include "kernels/merge-attention/merge-attention.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(merge_attention, MergeAttentionArguments)
KV_CUDA_KERNEL(merge_attention, MergeAttentionArguments)

Status merge_attention(const MergeAttentionArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return merge_attention_cuda(arguments, context);
  merge_attention_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
