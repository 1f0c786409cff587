#include "kernels/block-sparse-attention/block-sparse-attention.h"

#include "shared/attention/prefill/dense-cache.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

static_assert(kKeyBlockTokens == kTileKeys, "a key block is one tile of the panels");

struct ListedKeyTiles {
  const int32_t* blocks;
  int32_t count;

  template <class Body>
  void operator()(int32_t keys, Body&& body) const {
    for (int32_t i = 0; i < count && blocks[i] * kKeyBlockTokens < keys; ++i) body(blocks[i] * kKeyBlockTokens);
  }
};

// A task is one query tile of one query head.
template <class Cache>
void attend_tiles(const BlockSparseAttentionArguments& a, const Cache& cache, Workers& workers) {
  // Entry b has the tiles tile_start[b] .. tile_start[b + 1] - 1.
  int64_t* tile_start =
      static_cast<int64_t*>(workers.shared_scratch(sizeof(int64_t) * (static_cast<size_t>(a.batch) + 1)));
  tile_start[0] = 0;
  for (int32_t b = 0; b < a.batch; ++b) {
    tile_start[b + 1] = tile_start[b] + query_tiles_of(a.query_start[b + 1] - a.query_start[b]);
  }
  const int stride = row_stride(a.head_dim);
  const int64_t tile_floats = cache.tile_floats(stride);
  const size_t tasks = static_cast<size_t>(tile_start[a.batch] * a.query_heads);
  workers.for_each(tasks, [&](size_t index, int worker) {
    // Later queries see more keys, so they go first: the short tasks at the end even out the workers' times.
    const int64_t task = static_cast<int64_t>(tasks - 1 - index);
    const int64_t tile = task / a.query_heads;
    const int64_t query_head = task % a.query_heads;
    int32_t b = 0;
    while (tile >= tile_start[b + 1]) ++b;
    const int64_t list = a.lists.list(query_head, tile);
    const ListedKeyTiles key_tiles{a.lists.blocks_of(list), a.lists.counts[list]};
    const RowRange range = RowRange::of_query_head(a, b, query_head);
    Scratch scratch(workers.scratch(worker, Scratch::bytes(stride, tile_floats)), stride, tile_floats);
    int64_t row = (tile - tile_start[b]) * kListedQueryTile;
    const int64_t end = row + kListedQueryTile < range.rows() ? row + kListedQueryTile : range.rows();
    for (; row < end; row += kTaskPanels * kPanelRows) {
      const int64_t rows = end - row < kTaskPanels * kPanelRows ? end - row : kTaskPanels * kPanelRows;
      attend_rows(a, cache, key_tiles, range, row, rows, scratch);
    }
  });
}

}  // namespace

void block_sparse_attention(const BlockSparseAttentionArguments& a, Workers& workers) {
  with_cache_type(a, [&](auto element) { attend_tiles(a, DenseCache<decltype(element)>{a}, workers); });
}

}  // namespace KV_ISA
}  // namespace kv
