// The product for many rows of input, bound by arithmetic. The input is packed once, in tiles of a few rows;
// a task widens and transposes one panel of weights, a few output features wide, and multiplies the tiles
// with it. A tile times a panel runs over all input features with its sums in registers.
#pragma once

#include "kernels/linear/linear-rows.cpu.h"
#include "shared/cpu/transpose.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Registers: rows x 2 sums, 2 of the panel, and one broadcast.
constexpr int kTileRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;
constexpr int kPanelOuts = 2 * kLanes;
// Weights are asked for this far ahead in each row: hardware does not follow a panel's many rows at once.
constexpr int64_t kPanelPrefetchBytes = 256;
// Packed input of one pass over the weights: it should stay in the last-level cache.
constexpr int64_t kPackedInputBytes = 12 << 20;

// panel[k, out] = weight[out, k] in f32, from output feature `begin` on; zeros after the last input feature,
// anything after the last output feature.
template <class W>
inline void pack_panel(const LinearArguments& a, int64_t begin, float* panel) {
  const W* weight = static_cast<const W*>(a.weight);
  for (int64_t out = 0; out < kPanelOuts; out += kLanes) {
    for (int64_t k = 0; k < a.in_features; k += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const W* row = weight + smaller(begin + out + i, a.out_features - 1) * a.weight_stride + k;
        __builtin_prefetch(row + kPanelPrefetchBytes / sizeof(W));
        square[i] = load_up_to(row, a.in_features - k);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(panel + (k + i) * kPanelOuts + out, square[i]);
    }
  }
}

// sums[row, out] = sum_k tile[k / kLanes, row, k % kLanes] * panel[k, out]
template <int rows>
void multiply_tile(const float* tile, const float* panel, int64_t depth, float* sums) {
  Vec total[rows][2] = {};
  for (int64_t k = 0; k < depth; k += kLanes, tile += rows * kLanes) {
    for (int lane = 0; lane < kLanes; ++lane, panel += kPanelOuts) {
      const Vec first = load(panel), second = load(panel + kLanes);
      for (int i = 0; i < rows; ++i) {
        const Vec x = splat(tile[i * kLanes + lane]);
        total[i][0] += x * first;
        total[i][1] += x * second;
      }
    }
  }
  // Left to itself, GCC keeps a loop here and copies the sums from registers to memory first.
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
    store(sums + i * kPanelOuts, total[i][0]);
    store(sums + i * kPanelOuts + kLanes, total[i][1]);
  }
}

template <int rows>
inline auto multiply_tile_of(int64_t count) {
  if constexpr (rows == 1) {
    return multiply_tile<1>;
  } else {
    return count == rows ? multiply_tile<rows> : multiply_tile_of<rows - 1>(count);
  }
}

// The rows of one pass, in tiles whose heights differ by at most one.
struct Tiles {
  int64_t first, tokens, count;

  int64_t begin(int64_t tile) const { return first + tokens * tile / count; }
  int64_t rows(int64_t tile) const { return begin(tile + 1) - begin(tile); }
};

// Asks for the lines that a tile's results will go to, so that they arrive during the multiplication.
inline void prefetch_outputs(const LinearArguments& a, int64_t row, int64_t rows, int64_t out, int64_t outs) {
  const int64_t size = static_cast<int64_t>(byte_size(a.dtype));
  for (int64_t i = 0; i < rows; ++i) {
    const char* line = static_cast<const char*>(a.output) + ((row + i) * a.output_stride + out) * size;
    for (int64_t byte = 0; byte < outs * size; byte += 64) __builtin_prefetch(line + byte, 1);
  }
}

void multiply_tiles(const LinearArguments& a, Workers& workers, const Tiles& tiles) {
  const int64_t depth = round_up(a.in_features, kLanes);
  const int64_t tile_floats = kTileRows * depth;
  const size_t packed_bytes = static_cast<size_t>(tiles.count * tile_floats) * sizeof(float);
  float* packed = static_cast<float*>(workers.shared_ring(packed_bytes));
  workers.for_each(static_cast<size_t>(tiles.count), [&](size_t index, int) {
    const int64_t tile = static_cast<int64_t>(index);
    pack_rows(a, tiles.begin(tile), tiles.rows(tile), packed + tile * tile_floats);
  });
  // With few panels, several tasks pack the same one and share the tiles.
  const int64_t panels = divide_up(a.out_features, kPanelOuts);
  const int64_t shares = smaller(divide_up(2 * workers.count(), panels), tiles.count);
  workers.for_each(static_cast<size_t>(panels * shares), [&](size_t index, int worker) {
    const int64_t share = static_cast<int64_t>(index) % shares;
    const int64_t begin = static_cast<int64_t>(index) / shares * kPanelOuts;
    const int64_t outs = smaller(kPanelOuts, a.out_features - begin);
    const size_t panel_bytes = static_cast<size_t>(kPanelOuts * depth) * sizeof(float);
    float* panel = static_cast<float*>(workers.scratch(worker, panel_bytes));
    with_float_type(a.weight_dtype, [&](auto element) { pack_panel<decltype(element)>(a, begin, panel); });
    float bias[kPanelOuts];
    read_bias(a, begin, outs, bias);
    for (int64_t tile = tiles.count * share / shares; tile < tiles.count * (share + 1) / shares; ++tile) {
      alignas(64) float sums[kTileRows * kPanelOuts];
      const int64_t row = tiles.begin(tile), rows = tiles.rows(tile);
      prefetch_outputs(a, row, rows, begin, outs);
      multiply_tile_of<kTileRows>(rows)(packed + tile * tile_floats, panel, depth, sums);
      with_float_type(a.dtype, [&](auto element) {
        for (int64_t i = 0; i < rows; ++i) {
          write_sums<decltype(element)>(a, row + i, begin, outs, sums + i * kPanelOuts, bias);
        }
      });
    }
  });
}

void multiply_many_rows(const LinearArguments& a, Workers& workers) {
  const int64_t row_bytes = (a.in_features + 1) * static_cast<int64_t>(sizeof(float));
  const int64_t passes = divide_up(a.tokens * row_bytes, kPackedInputBytes);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = a.tokens * pass / passes;
    const int64_t tokens = a.tokens * (pass + 1) / passes - first;
    if (tokens > 0) multiply_tiles(a, workers, {first, tokens, divide_up(tokens, kTileRows)});
  }
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
