#include "kernels/dequantize-kv/dequantize-kv.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"
#include "shared/quantized-blocks/quantized-blocks.h"

namespace kv {

KV_CPU_KERNEL(dequantize_kv, DequantizeKvArguments)
KV_CUDA_KERNEL(dequantize_kv, DequantizeKvArguments)

Status dequantize_kv(const DequantizeKvArguments& arguments, ExecutionContext& context) {
  Status status = validate_quantized_format(arguments.head_dim, arguments.key_bits);
  if (status.ok() && arguments.values != nullptr) {
    status = validate_quantized_format(arguments.head_dim, arguments.value_bits);
  }
  if (!status.ok() || arguments.copies == 0) return status;
  if (context.device == DeviceKind::cuda) return dequantize_kv_cuda(arguments, context);
  dequantize_kv_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
