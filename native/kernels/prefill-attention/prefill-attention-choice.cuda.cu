// Which kernel a CUDA device computes prefill attention with.
#include "kernels/attention-tensor-cores.h"
#include "kernels/cuda-elements.h"
#include "kernels/prefill-attention/prefill-attention-any.h"
#include "kernels/prefill-attention/prefill-attention.cuda.h"
#include "runtime/device.h"

namespace kv {

Status prefill_attention_cuda(const PagedAttentionArguments& arguments, ExecutionContext& context) {
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return cuda_status(error);
  const bool ampere_or_ada = major == 8;
  if (ampere_or_ada && fits_tensor_cores(arguments, 1)) {
    return sm80::prefill_attention(arguments, stream_of(context));
  }
  const bool hopper = major == 9;
  if (!hopper || !fits_tensor_cores(arguments, kPrefillBlockMultiple)) {
    return attention_any_cuda(arguments, context);
  }
  void* workspace = context.queue->workspace(kPrefillAttentionWorkspaceBytes);
  if (workspace == nullptr) {
    return Status::failure(StatusCode::out_of_memory, "no room for prefill attention's workspace");
  }
  return sm90a::prefill_attention(arguments, workspace, stream_of(context));
}

}  // namespace kv
