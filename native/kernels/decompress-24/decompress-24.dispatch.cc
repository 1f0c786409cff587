#include "kernels/decompress-24/decompress-24.h"

#include <string>

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(decompress_24, Decompress24Arguments)
KV_CUDA_KERNEL(decompress_24, Decompress24Arguments)

static Status validate_number(const char* name, int32_t index, int32_t number, int64_t blocks) {
  if (number >= 0 && number < blocks) return Status::success();
  return Status::failure(StatusCode::invalid_value, std::string(name) + "[" + std::to_string(index) + "] is " +
                                                        std::to_string(number) + "; blocks are 0 to " +
                                                        std::to_string(blocks - 1));
}

Status decompress_24(const Decompress24Arguments& arguments, ExecutionContext& context) {
  Status status = validate_block_format(arguments.dtype, arguments.head_dim);
  if (!status.ok()) return status;
  status = validate_block_memory({arguments.dense, arguments.sparse.non_zeros, arguments.sparse.metadata});
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return decompress_24_cuda(arguments, context);
  for (int32_t i = 0; i < arguments.count; ++i) {
    status = validate_number("ids", i, arguments.ids[i], arguments.sparse.block_count);
    if (status.ok()) status = validate_number("places", i, arguments.places[i], arguments.dense_count);
    if (!status.ok()) return status;
  }
  decompress_24_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
