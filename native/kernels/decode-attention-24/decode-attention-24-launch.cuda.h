// Launches decode attention over 2:4 blocks, for any way of copying pieces. Host code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/decode-attention-24/decode-attention-24-block.cuda.h"
#include "kernels/decode-attention-24/decode-attention-24.cuda.h"
#include "runtime/check.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {

template <typename Element, int kHeadDim, int kColumnTiles, template <typename, int, int> class CopiesOf>
Status launch_decode_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                           FaultSink faults, cudaStream_t stream) {
  using Copies = CopiesOf<Element, kHeadDim, 8 * kColumnTiles>;
  using Block = DecodeBlock24<Element, kHeadDim, kColumnTiles, Copies>;
  DecodeParameters24<typename Copies::Maps> parameters;
  parameters.arguments = arguments;
  parameters.faults = faults;
  parameters.tickets = static_cast<Tickets24*>(counters);
  parameters.arrivals = reinterpret_cast<unsigned*>(parameters.tickets + 1);
  parameters.partials = workspace;
  const Status status = Copies::describe(arguments, &parameters.maps);
  if (!status.ok()) return status;
  int device = 0;
  int multiprocessors = 0;
  const auto kernel = decode_24_kernel<Element, kHeadDim, kColumnTiles, Copies>;
  constexpr int kSharedBytes = sizeof(typename Block::Shared);
  static_assert(kSharedBytes <= Copies::kMostSharedBytes, "more shared memory than these devices have");
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return cuda_status(error);
  return launch_overlapped(kernel, multiprocessors, Block::kThreads, kSharedBytes, stream, parameters);
}

template <typename Element, int kHeadDim, template <typename, int, int> class CopiesOf>
Status launch_decode_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                           FaultSink faults, cudaStream_t stream) {
  return decode_24_rows(arguments) == 8
             ? launch_decode_24<Element, kHeadDim, 1, CopiesOf>(arguments, counters, workspace, faults, stream)
             : launch_decode_24<Element, kHeadDim, 2, CopiesOf>(arguments, counters, workspace, faults, stream);
}

template <template <typename, int, int> class CopiesOf>
Status launch_decode_24(const Attention24Arguments& arguments, void* counters, void* workspace,
                           FaultSink faults, cudaStream_t stream) {
  if (!fits_decode_24(arguments)) {
    return Status::failure(StatusCode::capability, "these tensors do not fit the tensor-core decode attention over 2:4 blocks");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const bool small = arguments.head_dim == 64;
  if (arguments.cache_dtype == DType::f16) {
    return small ? launch_decode_24<__half, 64, CopiesOf>(arguments, counters, workspace, faults, stream)
                 : launch_decode_24<__half, 128, CopiesOf>(arguments, counters, workspace, faults, stream);
  }
  return small ? launch_decode_24<__nv_bfloat16, 64, CopiesOf>(arguments, counters, workspace, faults, stream)
               : launch_decode_24<__nv_bfloat16, 128, CopiesOf>(arguments, counters, workspace, faults, stream);
}

}  // namespace kv
