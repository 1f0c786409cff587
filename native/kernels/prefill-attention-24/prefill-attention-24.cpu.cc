#include "kernels/prefill-attention-24/prefill-attention-24.h"

#include "shared/attention/prefill/row-panels.cpu.h"
#include "shared/blocks-24/blocks-24.h"
#if defined(KV_TILES)
#include "kernels/prefill-attention-24/prefill-attention-24-tile-amx.cpu.h"
#else
#include "kernels/prefill-attention-24/prefill-attention-24-tile.cpu.h"
#endif

namespace kv {
namespace KV_ISA {
namespace {

template <class T>
struct Cache24 {
  const Attention24Arguments& a;

#if defined(KV_TILES)
  static int64_t tile_floats(int dim) { return 2 * PackedTile::floats(dim); }

  template <class Body>
  void with_tile(const RowRange& range, int32_t first_key, int32_t count, float* memory, Body&& body) const {
    const int64_t block = block_of(range, first_key);
    const int32_t key_entry = a.block_table[block];
    const int32_t value_entry = a.value_table[block];
    float* value_memory = memory + PackedTile::floats(a.head_dim);
    const auto row_of = [&](const void* pool, int32_t entry) {
      return [this, rows = dense_rows(pool, entry)](int i) { return rows + i * a.token_stride; };
    };
    body(is_dense(key_entry) ? pack_keys(a.head_dim, count, memory, row_of(a.keys, key_entry))
                             : pack_sparse_keys(non_zeros(a.sparse_keys, key_entry), metadata(a.sparse_keys, key_entry), a.head_dim, memory),
         is_dense(value_entry) ? pack_values(a.head_dim, count, value_memory, row_of(a.values, value_entry))
                               : pack_sparse_values(non_zeros(a.sparse_values, value_entry), metadata(a.sparse_values, value_entry), a.head_dim,
                                                    value_memory));
  }
#else
  static int64_t tile_floats(int stride) { return 2 * SparseTile::floats(stride); }

  template <class Body>
  void with_tile(const RowRange& range, int32_t first_key, int32_t count, float* memory, Body&& body) const {
    const int64_t block = block_of(range, first_key);
    const int32_t key_entry = a.block_table[block];
    const int32_t value_entry = a.value_table[block];
    float* value_memory = memory + SparseTile::floats(a.head_dim);
    const auto with_values = [&](const auto& keys) {
      if (is_dense(value_entry)) {
        body(keys, load_dense(a.values, value_entry, count, value_memory));
      } else {
        const SparseTile values(value_memory, a.head_dim, kTileKeys / 2);
        load_sparse_values(non_zeros(a.sparse_values, value_entry), metadata(a.sparse_values, value_entry), a.head_dim,
                           values);
        body(keys, values);
      }
    };
    if (is_dense(key_entry)) {
      with_values(load_dense(a.keys, key_entry, count, memory));
    } else {
      const SparseTile keys(memory, kTileKeys, a.head_dim / 2);
      load_sparse_keys(non_zeros(a.sparse_keys, key_entry), metadata(a.sparse_keys, key_entry), a.head_dim, keys);
      with_values(keys);
    }
  }

  DenseTile load_dense(const void* pool, int32_t entry, int32_t count, float* to) const {
    const T* rows = dense_rows(pool, entry);
    for (int32_t i = 0; i < count; ++i) {
      load_row(rows + i * a.token_stride, to + i * a.head_dim, a.head_dim, a.head_dim);
    }
    return {to, a.head_dim, a.head_dim};
  }
#endif

  int64_t block_of(const RowRange& range, int32_t first_key) const {
    return range.blocks - a.block_table + first_key / kBlock24Tokens;
  }
  const T* dense_rows(const void* pool, int32_t entry) const {
    return static_cast<const T*>(pool) + entry * a.block_stride;
  }
  const T* non_zeros(const SparseBlocks24& sparse, int32_t entry) const {
    return static_cast<const T*>(sparse.non_zeros) + block_number(entry) * sparse_block_elements(a.head_dim);
  }
  const uint32_t* metadata(const SparseBlocks24& sparse, int32_t entry) const {
    return sparse.metadata + block_number(entry) * sparse_block_words(a.head_dim);
  }
};

}  // namespace

void prefill_attention_24(const Attention24Arguments& a, Workers& workers) {
#if !defined(KV_TILES)
  if (a.cache_dtype == DType::f16) return prefill_panels(a, Cache24<Half>{a}, workers);
#endif
  prefill_panels(a, Cache24<Bfloat>{a}, workers);
}

}  // namespace KV_ISA
}  // namespace kv
