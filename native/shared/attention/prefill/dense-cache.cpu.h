// The dense paged cache, for the panels of prefill attention.
#pragma once

#include "shared/attention/prefill/row-panels.cpu.h"

namespace kv {
namespace KV_ISA {

// A `Cache` of row-panels.cpu.h whose blocks hold T.
template <class T>
struct DenseCache {
  const PagedAttentionArguments& a;

#if defined(KV_TILES)
  static int64_t tile_floats(int dim) { return 2 * PackedTile::floats(dim); }

  template <class Body>
  void with_tile(const RowRange& range, int32_t first_key, int32_t count, float* memory, Body&& body) const {
    const PackedTile keys = pack_keys(a.head_dim, count, memory, [&](int i) { return row(range, a.keys, first_key + i); });
    const PackedTile values = pack_values(a.head_dim, count, memory + PackedTile::floats(a.head_dim),
                                          [&](int i) { return row(range, a.values, first_key + i); });
    body(keys, values);
  }
#else
  static int64_t tile_floats(int stride) { return 2 * kTileKeys * stride; }

  template <class Body>
  void with_tile(const RowRange& range, int32_t first_key, int32_t count, float* memory, Body&& body) const {
    const int stride = row_stride(a.head_dim);
    float* values = memory + kTileKeys * stride;
    load_tile(range, a.keys, first_key, count, stride, memory);
    load_tile(range, a.values, first_key, count, stride, values);
    body(DenseTile{memory, stride, a.head_dim}, DenseTile{values, stride, a.head_dim});
  }

  void load_tile(const RowRange& range, const void* pool, int32_t first_key, int32_t count, int stride,
                 float* to) const {
    for (int32_t i = 0; i < count; ++i) load_row(row(range, pool, first_key + i), to + i * stride, a.head_dim, stride);
  }
#endif

  const T* row(const RowRange& range, const void* pool, int32_t key) const {
    const int64_t block = range.blocks[key / a.block_tokens];
    return static_cast<const T*>(pool) + block * a.block_stride + (key % a.block_tokens) * a.token_stride;
  }
};

// Calls body with a value of the C++ type that the cache stores.
template <class Body>
inline void with_cache_type(const PagedAttentionArguments& a, Body&& body) {
#if defined(KV_TILES)
  static_cast<void>(a);
  body(Bfloat{});
#else
  with_float_type(a.cache_dtype, body);
#endif
}

}  // namespace KV_ISA
}  // namespace kv
