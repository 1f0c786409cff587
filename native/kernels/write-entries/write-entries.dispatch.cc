#include "kernels/write-entries/write-entries.h"
#include "shared/dispatch/cpu-dispatch.h"
#include "shared/dispatch/cuda-dispatch.h"

namespace kv {

KV_CPU_KERNEL(write_entries, WriteEntriesArguments)
KV_CUDA_KERNEL(write_entries, WriteEntriesArguments)

Status write_entries(const WriteEntriesArguments& arguments, ExecutionContext& context) {
  if (arguments.count == 0) return Status::success();
  if (context.device == DeviceKind::cuda) return write_entries_cuda(arguments, context);
  write_entries_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
