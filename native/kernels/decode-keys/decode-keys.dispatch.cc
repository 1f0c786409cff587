#include "kernels/decode-keys/decode-keys.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(decode_keys, DecodeKeysArguments)
KV_CUDA_KERNEL(decode_keys, DecodeKeysArguments)

Status decode_keys(const DecodeKeysArguments& arguments, ExecutionContext& context) {
  const Status status = validate_coded_keys(arguments);
  if (!status.ok() || arguments.copies == 0) return status;
  if (context.device == DeviceKind::cuda) return decode_keys_cuda(arguments, context);
  decode_keys_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
