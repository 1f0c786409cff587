#include "kernels/swiglu/swiglu.h"

#include "kernels/cpu-dispatch.h"

namespace kv {

KV_CPU_KERNEL(swiglu, SwigluArguments)

Status swiglu(const SwigluArguments& arguments, ExecutionContext& context) {
  swiglu_cpu(arguments, context);
  return Status::success();
}

}  // namespace kv
