// Launches that may begin, on Hopper, while the kernel ahead of them in the stream ends, so that a step of many small
// kernels does not pay for the start of each. Every block of such a kernel calls ptx::wait_for_previous_kernel(),
// before it writes anything and before it reads what others write; what it reads ahead, it checks afterwards.
#pragma once

#include "ptx/dependent-launch.cuda.h"
#include "runtime/check.cuda.h"

namespace kv {

template <class... Parameters, class... Arguments>
Status launch_overlapped(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
  int major = 0;
  const Status found = find_compute_capability(major);
  if (!found.ok()) return found;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace kv
