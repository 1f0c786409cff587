// Launches the thread blocks of span-block.cuda.h. Host code.
#pragma once

#include <cuda_runtime.h>

#include "runtime/check.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Device memory that a launch needs. Counters are zero before and after it. The workspace's old content does not
// matter. Launches that may run at the same time need memory of their own.
struct DecodeAttentionMemory {
  size_t counter_bytes;
  size_t workspace_bytes;
};

inline cudaError_t count_span_blocks(int blocks_per_multiprocessor, int* blocks) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = multiprocessors * blocks_per_multiprocessor;
  return error;
}

// For entries of `pack_rows` rows and partials of `partial_bytes` bytes.
inline Status span_memory(const PagedAttentionArguments& arguments, int blocks_per_multiprocessor, int pack_rows,
                          size_t partial_bytes, DecodeAttentionMemory* memory) {
  int blocks = 0;
  const Status status = cuda_status(count_span_blocks(blocks_per_multiprocessor, &blocks));
  // An upper bound: only the device knows how many queries each entry has.
  const int group = arguments.query_heads / arguments.kv_heads;
  const size_t packs = size_t{1} * arguments.query_tokens * group / pack_rows + arguments.batch;
  const size_t entries = arguments.kv_heads * packs;
  memory->counter_bytes = entries * sizeof(unsigned);
  memory->workspace_bytes = (blocks + entries) * partial_bytes;
  return status;
}

template <class Parameters>
Status launch_spans(void (*kernel)(Parameters), int blocks_per_multiprocessor, int threads, int shared_bytes,
                    cudaStream_t stream, const Parameters& parameters) {
  int blocks = 0;
  cudaError_t error = count_span_blocks(blocks_per_multiprocessor, &blocks);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error != cudaSuccess) return cuda_status(error);
  return launch_overlapped(kernel, blocks, threads, shared_bytes, stream, parameters);
}

}  // namespace kv
