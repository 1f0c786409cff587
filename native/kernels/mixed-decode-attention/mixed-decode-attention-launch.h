// What launches mixed decode attention, whichever way its pieces travel. Host code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/overlapped-launch.cuda.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention-block.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention.cuda.h"
#include "runtime/cuda-check.h"

namespace kv {

template <typename Element, int kHeadDim, int kColumnTiles, template <typename, int, int> class CopiesOf>
Status launch_mixed_decode(const MixedAttentionArguments& arguments, void* counters, void* workspace,
                           FaultSink faults, cudaStream_t stream) {
  using Copies = CopiesOf<Element, kHeadDim, 8 * kColumnTiles>;
  using Block = MixedDecodeBlock<Element, kHeadDim, kColumnTiles, Copies>;
  MixedDecodeParameters<typename Copies::Maps> parameters;
  parameters.arguments = arguments;
  parameters.faults = faults;
  parameters.tickets = static_cast<MixedTickets*>(counters);
  parameters.arrivals = reinterpret_cast<unsigned*>(parameters.tickets + 1);
  parameters.partials = workspace;
  const Status status = Copies::describe(arguments, &parameters.maps);
  if (!status.ok()) return status;
  int device = 0;
  int multiprocessors = 0;
  const auto kernel = mixed_decode_kernel<Element, kHeadDim, kColumnTiles, Copies>;
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
Status launch_mixed_decode(const MixedAttentionArguments& arguments, void* counters, void* workspace,
                           FaultSink faults, cudaStream_t stream) {
  return mixed_decode_rows(arguments) == 8
             ? launch_mixed_decode<Element, kHeadDim, 1, CopiesOf>(arguments, counters, workspace, faults, stream)
             : launch_mixed_decode<Element, kHeadDim, 2, CopiesOf>(arguments, counters, workspace, faults, stream);
}

template <template <typename, int, int> class CopiesOf>
Status launch_mixed_decode(const MixedAttentionArguments& arguments, void* counters, void* workspace,
                           FaultSink faults, cudaStream_t stream) {
  if (!fits_mixed_decode(arguments)) {
    return Status::failure(StatusCode::capability, "these tensors do not fit the tensor-core mixed decode attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const bool small = arguments.head_dim == 64;
  if (arguments.cache_dtype == DType::f16) {
    return small ? launch_mixed_decode<__half, 64, CopiesOf>(arguments, counters, workspace, faults, stream)
                 : launch_mixed_decode<__half, 128, CopiesOf>(arguments, counters, workspace, faults, stream);
  }
  return small ? launch_mixed_decode<__nv_bfloat16, 64, CopiesOf>(arguments, counters, workspace, faults, stream)
               : launch_mixed_decode<__nv_bfloat16, 128, CopiesOf>(arguments, counters, workspace, faults, stream);
}

}  // namespace kv
