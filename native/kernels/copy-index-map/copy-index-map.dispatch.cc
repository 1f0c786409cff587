#include "kernels/copy-index-map/copy-index-map.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(copy_index_map, CopyIndexMapArguments)
KV_CUDA_KERNEL(copy_index_map, CopyIndexMapArguments)

Status copy_index_map(const CopyIndexMapArguments& arguments, ExecutionContext& context) {
  if (arguments.kv_heads == 0 || arguments.table_width == 0) return Status::success();
  if (context.device == DeviceKind::cuda) return copy_index_map_cuda(arguments, context);
  copy_index_map_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
