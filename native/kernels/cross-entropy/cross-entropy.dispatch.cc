#include "kernels/cross-entropy/cross-entropy.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(cross_entropy, CrossEntropyArguments)
KV_CUDA_KERNEL(cross_entropy, CrossEntropyArguments)

Status cross_entropy(const CrossEntropyArguments& arguments, ExecutionContext& context) {
  if (context.device == DeviceKind::cuda) return cross_entropy_cuda(arguments, context);
  cross_entropy_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
