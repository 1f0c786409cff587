#include "kernels/append-kv/append-kv.h"

#include "kernels/cpu-dispatch.h"
#include "kernels/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(append_kv, AppendKvArguments)
KV_CUDA_KERNEL(append_kv, AppendKvArguments)

Status append_kv(const AppendKvArguments& arguments, ExecutionContext& context) {
  if (!is_float(arguments.row_dtype)) {
    return Status::failure(StatusCode::capability, "new keys and values must be f32, f16 or bf16");
  }
  Status status = validate_sizes(arguments);
  if (!status.ok()) return status;
  if (context.device == DeviceKind::cuda) return append_kv_cuda(arguments, context);
  status = validate_tables(arguments, true);
  if (!status.ok()) return status;
  append_kv_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
