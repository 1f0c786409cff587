// Which rows are probed, and which lines cross a tile and a block. The numbers are the same on every device.
#pragma once

#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores.h"
#include "shared/prefill-block-scores/scored-tile.h"

namespace kv {
namespace KV_ISA {

constexpr int32_t kProbedRows = 64;
// Keys of a task. A fixed number, so that results do not depend on the number of workers.
constexpr int32_t kSplitKeys = 1024;
constexpr int32_t kRunLags = kScoredBlockKeys;

// The larger number, or NaN.
constexpr float most_or_nan(float most, float value) { return value > most || value != value ? value : most; }

// The lags of rows and keys of one split, counted from the smallest one.
constexpr int32_t kSplitLags = kSplitKeys + kProbedRows;

// One query head. The functions are constexpr, so that a CUDA device may evaluate them too.
struct ProbedHead {
  ScoredTile first;   // the entry's first tile
  int32_t rows;       // of the entry
  int32_t probed;     // how many rows are probed
  int32_t block_count;
  int32_t tile_count;

  constexpr ProbedHead(const PrefillBlockScoresArguments& a, int64_t head)
      : first(a, head, 0),
        rows(first.tokens - first.position),
        probed(rows < kProbedRows ? rows : kProbedRows),
        block_count(a.blocks),
        tile_count(a.tiles) {}

  constexpr int64_t row(int32_t probe) const { return first.first_row + rows - probed + probe; }
  constexpr int32_t position(int32_t probe) const { return first.tokens - probed + probe; }
  constexpr int32_t splits() const { return splits(block_count); }
  static constexpr int32_t splits(int32_t blocks) { return (blocks * kScoredBlockKeys + kSplitKeys - 1) / kSplitKeys; }

  // The lag of the first probed row and the split's last key; negative where the row does not see the key.
  constexpr int32_t first_lag(int32_t split) const { return position(0) - (split + 1) * kSplitKeys + 1; }

  // Of the keys that have this lag with a probed row.
  constexpr int32_t first_split(int32_t lag) const {
    return position(0) > lag ? (position(0) - lag) / kSplitKeys : 0;
  }
  constexpr int32_t last_split(int32_t lag) const { return (first.tokens - 1 - lag) / kSplitKeys; }

  // Run r is 64 lags, from lag_of_run(r) on. The lags of tile t and block b are those of the runs run_of(t, b) and
  // run_of(t, b) + 1, and the 63 lags before them.
  constexpr int32_t lag_of_run(int32_t run) const { return first.position + kRunLags * (run - block_count); }
  constexpr int32_t run_of(int32_t tile, int32_t block) const {
    return tile * (kScoredTileRows / kRunLags) - block + block_count;
  }
  constexpr int32_t runs() const { return runs(tile_count, block_count); }
  static constexpr int32_t runs(int32_t tiles, int32_t blocks) { return blocks + tiles * (kScoredTileRows / kRunLags) + 1; }
};

// The largest lines of one query head: verticals of each block, and slashes of each run and of the 63 lags before it.
struct LineMaxima {
  float* verticals;
  float* runs;
  float* before;

  constexpr float of(const ProbedHead& head, int32_t tile, int32_t block) const {
    const int32_t run = head.run_of(tile, block);
    return most_or_nan(most_or_nan(most_or_nan(verticals[block], before[run]), runs[run]), runs[run + 1]);
  }
};

}  // namespace KV_ISA
}  // namespace kv
