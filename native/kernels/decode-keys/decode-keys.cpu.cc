#include "kernels/decode-keys/decode-keys.h"

#include "runtime/workers.h"
#include "shared/coded-keys/coded-keys.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class T>
void decode_chunk(const DecodeKeysArguments& a, int64_t copy, int number, T* block) {
  const CodeChunk chunk = chunk_of(a, a.from[copy], number);
  const int head = a.heads[copy];
  const float* scales = a.channel_scale == nullptr ? nullptr : a.channel_scale + int64_t{head} * a.head_dim;
  const uint32_t* spoilt = a.spoilt(a.from[copy]);
  for (int stream = 0; stream < chunk.streams(); ++stream) {
    const int octet = stream / chunk.quads;
    for (int place = 0; place < kStreamCodes; ++place) {
      const int group = number * kChunkGroups + stream % chunk.quads * kQuadGroups + group_of(place);
      if (group >= a.groups()) continue;
      const int code = chunk.code(stream, place);
      const int centroid = code < a.centroid_count ? code : a.centroid_count - 1;
      const uint16_t* elements = a.centroids + a.book_offset(head, group) + int64_t{centroid} * a.sub_dim;
      const int token = token_of(octet, place);
      T* row = block + token * a.token_stride;
      for (int i = 0; i < a.sub_dim; ++i) {
        const int dim = group * a.sub_dim + i;
        const float x = half_to_float(elements[i]) * (scales == nullptr ? 1.0f : scales[dim]);
        from_float(row + dim, (spoilt[token / 32] >> token % 32 & 1) != 0 ? __builtin_nanf("") : x);
      }
    }
  }
}

}  // namespace

void decode_keys(const DecodeKeysArguments& a, Workers& workers) {
  const int chunks = coded_chunks(a.groups());
  workers.for_each(static_cast<size_t>(a.copies) * chunks, [&](size_t index, int) {
    const int64_t copy = static_cast<int64_t>(index) / chunks;
    with_float_type(a.dtype, [&](auto element) {
      auto* dense = static_cast<decltype(element)*>(a.keys);
      decode_chunk(a, copy, static_cast<int>(index) % chunks, dense + a.to[copy] * a.block_stride);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
