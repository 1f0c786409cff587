// What mixed decode attention takes, and the memory that it needs.
#include "kernels/attention-tensor-cores.h"
#include "kernels/decode-attention/decode-attention-merge.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention-line.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention.cuda.h"
#include "runtime/cuda-check.h"

namespace kv {

int mixed_decode_rows(const MixedAttentionArguments& arguments) {
  const int64_t group = arguments.query_heads / arguments.kv_heads;
  return arguments.query_tokens * group > int64_t{8} * arguments.batch ? 16 : 8;
}

bool fits_mixed_decode(const MixedAttentionArguments& arguments) {
  for (const void* data : {arguments.sparse_keys.non_zeros, arguments.sparse_values.non_zeros,
                           static_cast<const void*>(arguments.sparse_keys.metadata),
                           static_cast<const void*>(arguments.sparse_values.metadata)}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  }
  return arguments.block_tokens == kMixedBlockTokens && fits_tensor_cores(arguments, kMixedBlockTokens);
}

Status mixed_decode_memory(const MixedAttentionArguments& arguments, MixedDecodeMemory* memory) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  // At most: where the queries lie is known to the device only.
  const size_t rows = static_cast<size_t>(arguments.query_tokens) *
                      static_cast<size_t>(arguments.query_heads / arguments.kv_heads);
  const size_t packs = rows / static_cast<size_t>(mixed_decode_rows(arguments)) + static_cast<size_t>(arguments.batch);
  const size_t entries = static_cast<size_t>(arguments.kv_heads) * packs;
  memory->counter_bytes = sizeof(MixedTickets) + entries * sizeof(unsigned);
  const size_t segments = static_cast<size_t>(multiprocessors) * MixedRuns::kMostOfShare + entries;
  memory->workspace_bytes = segments * sizeof(DecodePartial<16, 128>);
  return cuda_status(error);
}

}  // namespace kv
