// Launches a kernel that may begin, on Hopper, while the kernel ahead of it in the stream ends (programmatic
// dependent launch). A step of many small kernels then does not pay for the start of each. Every thread block of such
// a kernel must call ptx::wait_for_previous_kernel() before it writes anything and before it reads what others write.
// What a kernel reads earlier than that, it must check afterwards.
#pragma once

#include "ptx/dependent-launch.cuda.h"
#include "runtime/check.cuda.h"

namespace kv {

// Of clusters of `cluster` thread blocks each, on Hopper; elsewhere `cluster` must be 1.
template <class... Parameters, class... Arguments>
Status launch_overlapped_clusters(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, unsigned cluster,
                                  size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  int major = 0;
  const Status found = find_compute_capability(major);
  if (!found.ok()) return found;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = major < 9 ? 0 : cluster == 1 ? 1 : 2;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class... Parameters, class... Arguments>
Status launch_overlapped(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, size_t shared_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
  return launch_overlapped_clusters(kernel, blocks, threads, 1, shared_bytes, stream, arguments...);
}

}  // namespace kv
