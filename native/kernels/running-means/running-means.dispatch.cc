#include "kernels/running-means/running-means.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(running_means, RunningMeansArguments)
KV_CUDA_KERNEL(running_means, RunningMeansArguments)

Status running_means(const RunningMeansArguments& arguments, ExecutionContext& context) {
  if (arguments.length == 0) return Status::success();
  if (context.device == DeviceKind::cuda) return running_means_cuda(arguments, context);
  running_means_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
