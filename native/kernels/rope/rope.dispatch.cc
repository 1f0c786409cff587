#include "kernels/rope/rope.h"

#include "kernels/cpu-dispatch.h"

namespace kv {

KV_CPU_KERNEL(rope, RopeArguments)

Status rope(const RopeArguments& arguments, ExecutionContext& context) {
  rope_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
