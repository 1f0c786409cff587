// Prefill attention over a cache of any kind. Its query rows are cut into panels, which workers share. Each panel
// goes over the keys tile by tile.
#pragma once

#include <math.h>

#include "runtime/workers.h"
#include "shared/attention/attention-rows.cpu.h"
#if defined(KV_TILES)
#include "shared/attention/prefill/key-tile-amx.cpu.h"
#else
#include "shared/attention/prefill/key-tile.cpu.h"
#endif

namespace kv {
namespace KV_ISA {

// The memory of one task, taken from a worker's scratch.
struct Scratch {
  int stride;
  float* tile;
  Panel panels[kTaskPanels];
  PanelProducts products;

  static size_t bytes(int stride, int64_t tile_floats) {
    const int64_t panel_floats = query_floats(stride) + (stride + 3) * kPanelRows;
    return static_cast<size_t>(PanelProducts::kFloats + tile_floats + kTaskPanels * panel_floats) * sizeof(float);
  }

  Scratch(void* memory, int stride, int64_t tile_floats) : stride(stride), products(static_cast<float*>(memory)) {
    float* next = static_cast<float*>(memory) + PanelProducts::kFloats;
    const auto take = [&](int64_t floats) {
      float* taken = next;
      next += floats;
      return taken;
    };
    tile = take(tile_floats);
    for (Panel& panel : panels) {
      panel.query = take(query_floats(stride));
      panel.output = take(stride * kPanelRows);
      panel.maximum = take(kPanelRows);
      panel.sum = take(kPanelRows);
      panel.visible = reinterpret_cast<int32_t*>(take(kPanelRows));
    }
  }
};

// Not inlined: so the binary has this, and finish_panel, once for all operations and caches.
template <class T>
__attribute__((noinline)) void begin_panel(const PagedAttentionArguments& a, const RowRange& range, int64_t first_row,
                                           int64_t rows, int stride, Panel& panel) {
  std::memset(panel.output, 0, sizeof(float) * static_cast<size_t>(stride) * kPanelRows);
  for (int row = 0; row < kPanelRows; ++row) {
    panel.maximum[row] = kLowestScore;
    panel.sum[row] = 0;
    panel.visible[row] = 0;
  }
  read_rows<T>(a, range, first_row, rows, stride, panel);
  panel.fewest_visible = panel.visible[0];
  panel.most_visible = panel.visible[rows - 1];
}

template <class T>
__attribute__((noinline)) void finish_panel(const PagedAttentionArguments& a, const RowRange& range, int64_t first_row,
                                            int64_t rows, const Panel& panel) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = range.token(first_row + row);
    const int64_t head = range.head(first_row + row);
    const float sum = panel.sum[row];
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    T* output = static_cast<T*>(a.output) + token * a.output_token_stride + head * a.output_head_stride;
    const int vector = static_cast<int>(row) / kLanes, lane = static_cast<int>(row) % kLanes;
    for (int d = 0; d < a.head_dim; ++d) from_float(output + d, panel.output[place(d, vector) + lane] * inverse);
    if (a.log_sum_exp != nullptr) {
      a.log_sum_exp[token * a.query_heads + head] = sum == 0 ? -HUGE_VALF : panel.maximum[row] + logf(sum);
    }
  }
}

// All keys, in tiles.
struct EveryKeyTile {
  template <class Body>
  void operator()(int32_t keys, Body&& body) const {
    for (int32_t first_key = 0; first_key < keys; first_key += kTileKeys) body(first_key);
  }
};

// Attention of `rows` rows from row `first_row` on, at most kTaskPanels panels. `key_tiles(keys, body)` must call
// body(first_key) for each tile of kTileKeys keys that these rows attend to and that begins below `keys`.
template <class Cache, class KeyTiles>
inline void attend_rows(const PagedAttentionArguments& a, const Cache& cache, const KeyTiles& key_tiles,
                        const RowRange& range, int64_t first_row, int64_t rows, Scratch& scratch) {
  const int64_t panels = divide_up(rows, kPanelRows);
  const auto rows_of = [&](int64_t panel) {
    const int64_t left = rows - panel * kPanelRows;
    return left < kPanelRows ? left : kPanelRows;
  };
  with_float_type(a.query_dtype, [&](auto element) {
    for (int64_t p = 0; p < panels; ++p) {
      begin_panel<decltype(element)>(a, range, first_row + p * kPanelRows, rows_of(p), scratch.stride,
                                     scratch.panels[p]);
    }
  });
  const int32_t keys = scratch.panels[panels - 1].most_visible;
  key_tiles(keys, [&](int32_t first_key) {
    const int32_t count = keys - first_key < kTileKeys ? keys - first_key : kTileKeys;
    cache.with_tile(range, first_key, count, scratch.tile, [&](const auto& tile_keys, const auto& tile_values) {
      scratch.products.attend(scratch.panels, panels, first_key, count, tile_keys, tile_values);
    });
  });
  with_float_type(a.output_dtype, [&](auto element) {
    for (int64_t p = 0; p < panels; ++p) {
      finish_panel<decltype(element)>(a, range, first_row + p * kPanelRows, rows_of(p), scratch.panels[p]);
    }
  });
}

// `Cache` reads the blocks of the keys and values:
//   with_tile(range, first_key, count, memory, body): calls body(keys, values), which multiply as DenseTile does;
//   tile_floats(stride): the size of `memory`.
// `stride` is row_stride of the head dimension.
template <class Cache>
inline void prefill_panels(const PagedAttentionArguments& a, const Cache& cache, Workers& workers) {
  const int64_t group = a.query_heads / a.kv_heads;
  const auto rows_of = [&](int64_t b) { return (a.query_start[b + 1] - a.query_start[b]) * group; };
  int64_t panels = 0;
  for (int32_t b = 0; b < a.batch; ++b) panels += a.kv_heads * divide_up(rows_of(b), kPanelRows);
  int64_t task_panels = panels / (workers.count() * kTasksPerWorker);
  task_panels = task_panels < 1 ? 1 : task_panels > kTaskPanels ? kTaskPanels : task_panels;
  const int64_t task_rows = task_panels * kPanelRows;

  // Entry b has the tasks task_start[b] .. task_start[b + 1] - 1.
  int64_t* task_start =
      static_cast<int64_t*>(workers.shared_scratch(sizeof(int64_t) * (static_cast<size_t>(a.batch) + 1)));
  task_start[0] = 0;
  for (int32_t b = 0; b < a.batch; ++b) {
    task_start[b + 1] = task_start[b] + a.kv_heads * divide_up(rows_of(b), task_rows);
  }
  const int stride = row_stride(a.head_dim);
  workers.for_each(static_cast<size_t>(task_start[a.batch]), [&](size_t index, int worker) {
    int32_t b = 0;
    while (static_cast<int64_t>(index) >= task_start[b + 1]) ++b;
    const int64_t task = static_cast<int64_t>(index) - task_start[b];
    const int64_t kv_head = task % a.kv_heads;
    // Later queries see more keys, so they go first: the short tasks at the end even out the workers' times.
    const int64_t chunk = divide_up(rows_of(b), task_rows) - 1 - task / a.kv_heads;
    const int64_t tile_floats = cache.tile_floats(stride);
    Scratch scratch(workers.scratch(worker, Scratch::bytes(stride, tile_floats)), stride, tile_floats);
    const int64_t first_row = chunk * task_rows;
    const int64_t rows_left = rows_of(b) - first_row;
    attend_rows(a, cache, EveryKeyTile{}, RowRange(a, b, kv_head), first_row,
                rows_left < task_rows ? rows_left : task_rows, scratch);
  });
}

}  // namespace KV_ISA
}  // namespace kv
