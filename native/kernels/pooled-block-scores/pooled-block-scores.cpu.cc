#include "kernels/pooled-block-scores/pooled-block-scores.h"

#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/key-tile.cpu.h"
#include "shared/prefill-block-scores/prefill-block-scores.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Blocks that are multiplied together: the lanes of a vector are blocks here.
constexpr int32_t kPanelBlocks = kPanelRows;

// Writes the mean keys of a panel's blocks, [dim, block]. `sum` has room for a key.
template <class T>
void pool_keys(const PrefillBlockScoresArguments& a, int64_t kv_head, int32_t first_block, float* sum, float* means) {
  const int64_t cache_head = int64_t{a.slots[0]} * a.kv_heads + kv_head;
  const int32_t* blocks = a.block_table + cache_head * a.table_width;
  const int32_t tokens = a.key_counts[cache_head];
  for (int32_t i = 0; i < kPanelBlocks; ++i) {
    const int32_t first = (first_block + i) * kScoredBlockKeys;
    const int32_t count = tokens - first < kScoredBlockKeys ? tokens - first : kScoredBlockKeys;
    std::memset(sum, 0, static_cast<size_t>(a.head_dim) * sizeof(float));
    for (int32_t key = first; key < first + count; ++key) {
      const T* row = key_at<T>(a, blocks, key);
      int32_t d = 0;
      for (; d + kLanes <= a.head_dim; d += kLanes) store(sum + d, load(sum + d) + load(row + d));
      for (; d < a.head_dim; ++d) sum[d] += to_float(row[d]);
    }
    for (int32_t d = 0; d < a.head_dim; ++d) means[d * kPanelBlocks + i] = count > 0 ? sum[d] / static_cast<float>(count) : 0;
  }
}

template <class T>
void load_queries(const PrefillBlockScoresArguments& a, const ScoredTile& tile, float* to) {
  for (int32_t row = 0; row < kScoredTileRows; ++row) {
    if (row >= tile.rows) {
      std::memset(to + row * a.head_dim, 0, static_cast<size_t>(a.head_dim) * sizeof(float));
      continue;
    }
    const T* query = query_at<T>(a, tile.first_row + row, tile.query_head);
    for (int32_t d = 0; d < a.head_dim; ++d) to[row * a.head_dim + d] = to_float(query[d]) * a.scale;
  }
}

// Writes the logarithms of the energies of one panel's blocks.
void score_panel(const PrefillBlockScoresArguments& a, const ScoredTile& tile, int32_t first_block, const float* queries,
                 const float* means, float* products) {
  Vec peaks[kPanelVectors];
  Vec sums[kPanelVectors] = {};
  for (Vec& peak : peaks) peak = splat(kLowestScore);
  for (int32_t first = 0; first < tile.rows; first += kStep) {
    multiply<false>(queries + first * a.head_dim, a.head_dim, 1, means, a.head_dim, nullptr, products);
    const int32_t count = tile.rows - first < kStep ? tile.rows - first : kStep;
    for (int32_t row = 0; row < count; ++row) {
      const int32_t seen = tile.seen_by(first + row) - first_block;
      for (int32_t i = seen > 0 ? seen : 0; i < kPanelBlocks; ++i) products[row * kPanelBlocks + i] = -__builtin_inff();
    }
    for (int v = 0; v < kPanelVectors; ++v) {
      Vec peak = peaks[v];
      for (int32_t row = 0; row < count; ++row) peak = maximum(peak, load(products + row * kPanelBlocks + v * kLanes));
      Vec sum = sums[v] * exponential(peaks[v] - peak);
      for (int32_t row = 0; row < count; ++row) sum += exponential(load(products + row * kPanelBlocks + v * kLanes) - peak);
      peaks[v] = peak;
      sums[v] = sum;
    }
  }
  for (int32_t i = 0; i < kPanelBlocks && first_block + i < tile.seen(); ++i) {
    tile.scores[first_block + i] = peaks[i / kLanes][i % kLanes] + __builtin_logf(sums[i / kLanes][i % kLanes]);
  }
}

}  // namespace

void pooled_block_scores(const PooledBlockScoresArguments& a, Workers& workers) {
  const int64_t panels = divide_up(a.blocks, kPanelBlocks);
  const int64_t of_panel = int64_t{a.head_dim} * kPanelBlocks;
  auto* means = static_cast<float*>(workers.shared_scratch(static_cast<size_t>(a.kv_heads * panels * of_panel) * sizeof(float)));
  workers.for_each(static_cast<size_t>(a.kv_heads * panels), [&](size_t index, int worker) {
    auto* sum = static_cast<float*>(workers.scratch(worker, static_cast<size_t>(a.head_dim) * sizeof(float)));
    const int64_t panel = static_cast<int64_t>(index);
    const auto first_block = static_cast<int32_t>(panel % panels) * kPanelBlocks;
    with_float_type(a.cache_dtype, [&](auto element) {
      pool_keys<decltype(element)>(a, panel / panels, first_block, sum, means + panel * of_panel);
    });
  });
  const size_t floats = static_cast<size_t>(kScoredTileRows * a.head_dim + kStep * kPanelBlocks);
  workers.for_each(static_cast<size_t>(int64_t{a.tiles} * a.query_heads), [&](size_t index, int worker) {
    // The last tiles see the most, so they come first.
    const auto tile_index = a.tiles - 1 - static_cast<int32_t>(index / static_cast<size_t>(a.query_heads));
    const ScoredTile tile(a, static_cast<int64_t>(index) % a.query_heads, tile_index);
    auto* queries = static_cast<float*>(workers.scratch(worker, floats * sizeof(float)));
    float* products = queries + kScoredTileRows * a.head_dim;
    with_float_type(a.query_dtype, [&](auto element) { load_queries<decltype(element)>(a, tile, queries); });
    for (int32_t first = 0; first < tile.seen(); first += kPanelBlocks) {
      const float* of_panels = means + (tile.kv_head * panels + first / kPanelBlocks) * of_panel;
      score_panel(a, tile, first, queries, of_panels, products);
    }
    normalise(a, tile);
  });
}

}  // namespace KV_ISA
}  // namespace kv
