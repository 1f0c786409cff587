#include "kernels/gather-kv/gather-kv.h"

#include <cstring>

#include "kernels/simd.h"

namespace kv {
namespace KV_ISA {
namespace {

// Byte offset in a pool of the token at `index` of a head whose blocks are `blocks`.
int64_t offset_of(const GatherKvArguments& a, const int32_t* blocks, int32_t index) {
  const int64_t element = blocks[index / a.block_tokens] * a.block_stride + index % a.block_tokens * a.token_stride;
  return element * static_cast<int64_t>(byte_size(a.cache_dtype));
}

}  // namespace

void gather_kv(const GatherKvArguments& a, Workers& workers) {
  const size_t row_bytes = static_cast<size_t>(a.head_dim) * byte_size(a.cache_dtype);
  workers.for_each(static_cast<size_t>(a.kv_heads), [&](size_t head, int) {
    const int32_t* blocks = a.block_table + static_cast<int64_t>(head) * a.table_width;
    const int32_t* indices = a.indices + static_cast<int64_t>(head) * a.index_stride;
    // Ascending indices never fall behind the token that they fill, so moving in order overwrites nothing
    // that is still wanted.
    for (int32_t i = 0; i < a.counts[head]; ++i) {
      if (indices[i] == i) continue;
      const int64_t from = offset_of(a, blocks, indices[i]);
      const int64_t to = offset_of(a, blocks, i);
      std::memcpy(static_cast<char*>(a.key_pool) + to, static_cast<char*>(a.key_pool) + from, row_bytes);
      std::memcpy(static_cast<char*>(a.value_pool) + to, static_cast<char*>(a.value_pool) + from, row_bytes);
    }
    a.key_counts[head] = a.counts[head];
  });
}

}  // namespace KV_ISA
}  // namespace kv
