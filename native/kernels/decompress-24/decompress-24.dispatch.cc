#include "kernels/decompress-24/decompress-24.h"

#include <string>

#include "kernels/cpu-dispatch.h"
#include "kernels/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(decompress_24, Decompress24Arguments)
KV_CUDA_KERNEL(decompress_24, Decompress24Arguments)

Status decompress_24(const Decompress24Arguments& arguments, ExecutionContext& context) {
  Status status = validate_block_format(arguments.dtype, arguments.head_dim);
  if (!status.ok()) return status;
  status = validate_block_memory({arguments.dense, arguments.sparse.non_zeros, arguments.sparse.metadata});
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return decompress_24_cuda(arguments, context);
  for (int32_t i = 0; i < arguments.count; ++i) {
    if (arguments.ids[i] >= 0 && arguments.ids[i] < arguments.sparse.block_count) continue;
    return Status::failure(StatusCode::invalid_value, "ids[" + std::to_string(i) + "] is " +
                                                          std::to_string(arguments.ids[i]) + "; sparse blocks are 0 to " +
                                                          std::to_string(arguments.sparse.block_count - 1));
  }
  decompress_24_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
