#include "kernels/encode-keys/encode-keys.h"

#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(encode_keys, EncodeKeysArguments)
KV_CUDA_KERNEL(encode_keys, EncodeKeysArguments)

Status encode_keys(const EncodeKeysArguments& arguments, ExecutionContext& context) {
  const Status status = validate_coded_keys(arguments);
  if (!status.ok() || arguments.copies == 0) return status;
  if (reinterpret_cast<uintptr_t>(arguments.index) % 16 != 0) {
    return Status::failure(StatusCode::invalid_value, "an index must begin at a multiple of 16 bytes: give a tensor of its own");
  }
  if (context.device == DeviceKind::cuda) return encode_keys_cuda(arguments, context);
  encode_keys_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
