// Codes of coded blocks, for CUDA kernels. Device code.
#pragma once

#include "shared/coded-keys/coded-keys.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

constexpr uint32_t low_bits(int count) { return (1u << count) - 1; }

// The code of a token of a block and a group.
__device__ inline int code_at(const CodedKeys& keys, const uint32_t* block, int token, int group) {
  const int chunk = group / kChunkGroups;
  const int quads = quads_of_chunk(keys.groups(), chunk);
  const int place = token / 32 * 16 + token % 4 * 4 + group % 4;
  const int bit = place * keys.code_bits;
  const int step = kChunkOctets * quads;
  const uint32_t* word = block + chunk_offset(chunk, keys.code_bits) + bit / 32 * step + token % 32 / 4 * quads + group % 16 / 4;
  const uint32_t high = bit % 32 + keys.code_bits > 32 ? word[step] : 0;
  const int code = static_cast<int>(__funnelshift_r(*word, high, bit % 32) & low_bits(keys.code_bits));
  return code < keys.centroid_count ? code : keys.centroid_count - 1;
}

__device__ inline float half_value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

}  // namespace kv
