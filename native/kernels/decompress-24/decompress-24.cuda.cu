#include <cstdint>

#include "kernels/decompress-24/decompress-24.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/paged-faults.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

// Four neighbours, two of which are kept, as the nibble says.
__device__ uint2 expand(uint32_t nibble, uint16_t first, uint16_t second) {
  uint32_t words[2] = {};
  words[(nibble & 3u) / 2] |= uint32_t{first} << (nibble & 1u) * 16;
  words[nibble >> 3] |= uint32_t{second} << (nibble >> 2 & 1u) * 16;
  return {words[0], words[1]};
}

__device__ uint32_t nibble_of(const uint32_t* metadata, Meta16Place place, int group) {
  return metadata[place.word] >> (place.shift + 4 * group) & 15u;
}

// One thread block writes one block. Each thread writes four neighbours at a time.
__global__ void __launch_bounds__(kThreads) decompress_kernel(const __grid_constant__ Decompress24Arguments arguments,
                                                              FaultSink faults) {
  const int dims = arguments.head_dim;
  const int id = arguments.ids[blockIdx.x];
  const int place = arguments.places[blockIdx.x];
  const bool known = id >= 0 && id < arguments.sparse.block_count;
  if (!known || place < 0 || place >= arguments.dense_count) {
    if (threadIdx.x == 0) report_fault(faults, PagedFault::block_out_of_range, known ? place : id);
    return;
  }
  const auto* non_zeros = static_cast<const uint16_t*>(arguments.sparse.non_zeros) + id * sparse_block_elements(dims);
  const uint32_t* metadata = arguments.sparse.metadata + id * sparse_block_words(dims);
  auto* dense = static_cast<uint16_t*>(arguments.dense) + int64_t{place} * kBlock24Tokens * dims;
  for (int i = threadIdx.x; i < kBlock24Tokens * dims / 4; i += kThreads) {
    if (arguments.operand == KvOperand::keys) {
      const int token = i / (dims / 4);
      const int group = i % (dims / 4);
      const uint32_t nibble = nibble_of(metadata, key_meta16(token, group / 4, dims), group % 4);
      const uint16_t* kept = non_zeros + key_non_zero(token, 2 * group, dims);
      *reinterpret_cast<uint2*>(dense + token * dims + 4 * group) = expand(nibble, kept[0], kept[1]);
    } else {
      const int group = i / dims;
      const int dim = i % dims;
      const uint32_t nibble = nibble_of(metadata, value_meta16(dim, group / 4), group % 4);
      const uint2 tokens =
          expand(nibble, non_zeros[value_non_zero(2 * group, dim)], non_zeros[value_non_zero(2 * group + 1, dim)]);
      uint16_t* column = dense + 4 * group * dims + dim;
      column[0] = static_cast<uint16_t>(tokens.x);
      column[dims] = static_cast<uint16_t>(tokens.x >> 16);
      column[2 * dims] = static_cast<uint16_t>(tokens.y);
      column[3 * dims] = static_cast<uint16_t>(tokens.y >> 16);
    }
  }
}

}  // namespace

Status decompress_24_cuda(const Decompress24Arguments& arguments, ExecutionContext& context) {
  if (arguments.count == 0) return Status::success();
  decompress_kernel<<<static_cast<unsigned>(arguments.count), kThreads, 0, stream_of(context)>>>(
      arguments, context.faults(describe_paged_fault));
  return launch_status();
}

}  // namespace kv
