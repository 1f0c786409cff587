// Which kernel a CUDA device computes decode attention with.
#include "kernels/attention-tensor-cores.h"
#include "kernels/cuda-elements.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/prefill-attention/prefill-attention-any.h"
#include "runtime/device.h"

namespace kv {

Status decode_attention_cuda(const PagedAttentionArguments& arguments, ExecutionContext& context) {
  if (!fits_tensor_cores(arguments, kDecodeBlockMultiple)) return attention_any_cuda(arguments, context);
  cuda::DecodeAttentionMemory memory;
  const Status status = cuda::decode_attention_memory(arguments, &memory);
  if (!status.ok()) return status;
  void* counters = context.queue->zeroed_workspace(memory.counter_bytes);
  void* workspace = context.queue->workspace(memory.workspace_bytes);
  if (counters == nullptr || workspace == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for decode attention's workspace");
  }
  return cuda::decode_attention(arguments, counters, workspace, stream_of(context));
}

}  // namespace kv
