#include "kernels/quantize-kv/quantize-kv.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"
#include "shared/quantized-blocks/quantized-blocks.h"

namespace kv {

KV_CPU_KERNEL(quantize_kv, QuantizeKvArguments)
KV_CUDA_KERNEL(quantize_kv, QuantizeKvArguments)

Status quantize_kv(const QuantizeKvArguments& arguments, ExecutionContext& context) {
  Status status = validate_quantized_format(arguments.head_dim, arguments.key_bits);
  if (status.ok() && arguments.values != nullptr) {
    status = validate_quantized_format(arguments.head_dim, arguments.value_bits);
  }
  if (!status.ok() || arguments.copies == 0) return status;
  if (context.device == DeviceKind::cuda) return quantize_kv_cuda(arguments, context);
  quantize_kv_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
