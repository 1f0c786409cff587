// Which arguments the CUDA kernels of decode attention over 2:4 blocks take, and how much memory they need.
#include "kernels/decode-attention-24/decode-attention-24-schedule.cuda.h"
#include "kernels/decode-attention-24/decode-attention-24.cuda.h"
#include "runtime/check.cuda.h"
#include "shared/attention/decode/merge-partials.cuda.h"
#include "shared/attention/tensor-core-shapes.h"

namespace kv {

int decode_24_rows(const Attention24Arguments& arguments) {
  const int64_t group = arguments.query_heads / arguments.kv_heads;
  return arguments.query_tokens * group > int64_t{8} * arguments.batch ? 16 : 8;
}

bool fits_decode_24(const Attention24Arguments& arguments) {
  for (const void* data : {arguments.sparse_keys.non_zeros, arguments.sparse_values.non_zeros,
                           static_cast<const void*>(arguments.sparse_keys.metadata),
                           static_cast<const void*>(arguments.sparse_values.metadata)}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  }
  return arguments.block_tokens == kBlock24Tokens && fits_tensor_cores(arguments, kBlock24Tokens);
}

Status decode_24_memory(const Attention24Arguments& arguments, DecodeMemory24* memory) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  // An upper bound: only the device knows how many rows each entry has.
  const size_t rows = static_cast<size_t>(arguments.query_tokens) *
                      static_cast<size_t>(arguments.query_heads / arguments.kv_heads);
  const size_t packs = rows / static_cast<size_t>(decode_24_rows(arguments)) + static_cast<size_t>(arguments.batch);
  const size_t entries = static_cast<size_t>(arguments.kv_heads) * packs;
  memory->counter_bytes = sizeof(Tickets24) + entries * sizeof(unsigned);
  const size_t splits = static_cast<size_t>(multiprocessors) * WorkTiles24::kMostOfShare + entries;
  memory->workspace_bytes = splits * sizeof(DecodePartial<16, 128>);
  return cuda_status(error);
}

}  // namespace kv
