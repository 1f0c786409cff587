// Declares the CUDA build of a kernel. In a build without CUDA, that is a function that refuses.
#pragma once

#include "runtime/execution.h"
#include "runtime/status.h"

#ifdef KV_HAVE_CUDA
#define KV_CUDA_KERNEL(name, Arguments) Status name##_cuda(const Arguments& arguments, ExecutionContext& context);
#else
#define KV_CUDA_KERNEL(name, Arguments)                                                            \
  static Status name##_cuda(const Arguments&, ExecutionContext&) {                                 \
    return Status::failure(StatusCode::capability, "this binary was built without CUDA");          \
  }
#endif
