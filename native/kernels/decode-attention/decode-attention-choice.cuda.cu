// Which kernel a CUDA device computes decode attention with.
#include "kernels/attention-tensor-cores.h"
#include "kernels/cuda-elements.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/prefill-attention/prefill-attention-any.h"
#include "runtime/device.h"

namespace kv {

Status decode_attention_cuda(const PagedAttentionArguments& arguments, ExecutionContext& context) {
  if (!fits_tensor_cores(arguments, kDecodeBlockMultiple)) return attention_any_cuda(arguments, context);
  size_t bytes = 0;
  const Status status = cuda::decode_attention_workspace_bytes(arguments, &bytes);
  if (!status.ok()) return status;
  void* workspace = context.queue->workspace(bytes);
  if (workspace == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for decode attention's workspace");
  }
  return cuda::decode_attention(arguments, workspace, stream_of(context));
}

}  // namespace kv
