// The dense paged cache, for the panels of prefill attention.
#pragma once

#include "shared/attention/prefill/row-panels.cpu.h"

namespace kv {
namespace KV_ISA {

// A `Cache` of row-panels.cpu.h whose blocks hold T.
template <class T>
struct DenseCache {
  const PagedAttentionArguments& a;

  static int64_t tile_floats(int stride) { return 2 * kTileKeys * stride; }

  template <class Body>
  void with_tile(const RowRange& range, int32_t first_key, int32_t count, float* memory, Body&& body) const {
    const int stride = static_cast<int>(divide_up(a.head_dim, kStep)) * kStep;
    float* values = memory + kTileKeys * stride;
    load_tile(range, a.keys, first_key, count, stride, memory);
    load_tile(range, a.values, first_key, count, stride, values);
    body(DenseTile{memory, stride, a.head_dim}, DenseTile{values, stride, a.head_dim});
  }

  void load_tile(const RowRange& range, const void* pool, int32_t first_key, int32_t count, int stride,
                 float* to) const {
    for (int32_t i = 0; i < count; ++i) {
      const int32_t key = first_key + i;
      const int64_t block = range.blocks[key / a.block_tokens];
      load_row(static_cast<const T*>(pool) + block * a.block_stride + (key % a.block_tokens) * a.token_stride,
               to + i * stride, a.head_dim, stride);
    }
  }
};

}  // namespace KV_ISA
}  // namespace kv
