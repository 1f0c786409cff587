#include "kernels/gather-kv/gather-kv.h"

#include <cstring>

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Byte offset in a pool of the token at `index`, for a head whose blocks are `blocks`.
int64_t offset_of(const GatherKvArguments& a, const int32_t* blocks, int32_t index) {
  const int64_t element = blocks[index / a.block_tokens] * a.block_stride + index % a.block_tokens * a.token_stride;
  return element * static_cast<int64_t>(byte_size(a.cache_dtype));
}

// How many tokens from `i` on are contiguous both where they are and where they go.
int32_t run_length(const GatherKvArguments& a, const int32_t* indices, int32_t i, int32_t count) {
  if (a.token_stride != a.head_dim) return 1;
  const int32_t from = indices[i] % a.block_tokens;
  const int32_t to = i % a.block_tokens;
  const int32_t room = a.block_tokens - (from > to ? from : to);
  int32_t length = 1;
  while (length < room && i + length < count && indices[i + length] == indices[i] + length) ++length;
  return length;
}

}  // namespace

void gather_kv(const GatherKvArguments& a, Workers& workers) {
  const size_t row_bytes = static_cast<size_t>(a.head_dim) * byte_size(a.cache_dtype);
  workers.for_each(static_cast<size_t>(a.kv_heads), [&](size_t head, int) {
    const int32_t* blocks = a.block_table + static_cast<int64_t>(head) * a.table_width;
    const int32_t* indices = a.indices + static_cast<int64_t>(head) * a.index_stride;
    if (a.outcomes != nullptr && a.outcomes[head] != 0) {
      if (a.counts[head] < a.key_counts[head]) a.key_counts[head] = a.counts[head];
      return;
    }
    // Indices ascend, so no index is less than the place that its token fills. Moving in order therefore never
    // overwrites a token that is still needed.
    for (int32_t i = 0, length = 1; i < a.counts[head]; i += length) {
      length = run_length(a, indices, i, a.counts[head]);
      if (indices[i] == i) continue;
      const int64_t from = offset_of(a, blocks, indices[i]);
      const int64_t to = offset_of(a, blocks, i);
      const size_t bytes = static_cast<size_t>(length) * row_bytes;
      std::memmove(static_cast<char*>(a.key_pool) + to, static_cast<char*>(a.key_pool) + from, bytes);
      std::memmove(static_cast<char*>(a.value_pool) + to, static_cast<char*>(a.value_pool) + from, bytes);
    }
    a.key_counts[head] = a.counts[head];
  });
}

}  // namespace KV_ISA
}  // namespace kv
