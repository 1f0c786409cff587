// The product for many rows of input, bound by arithmetic. Input rows are packed once into tiles
// [tile][in][row]; each task widens and packs one panel of weights, [in][out], and multiplies every
// tile with it. A tile times a panel runs over all input features with its sums in registers.
#pragma once

#include "kernels/linear/linear-rows.h"

namespace kv {
namespace KV_ISA {
namespace {

// Registers: rows x 2 sums, 2 of the panel, and one broadcast.
constexpr int kTileRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;
constexpr int kPanelOuts = 2 * kLanes;
// Packed input of one pass over the weights: it should stay in the last-level cache.
constexpr int64_t kPackedInputBytes = 12 << 20;

// Transposes a square of lanes: lane j of row i and lane i of row j trade places.
template <int step = kLanes / 2>
inline void transpose(Vec* rows) {
  if constexpr (step > 0) {
    VecInt low = {}, high = {};
    for (int i = 0; i < kLanes; ++i) {
      low[i] = (i & step) ? kLanes + i - step : i;
      high[i] = (i & step) ? kLanes + i : i + step;
    }
    for (int i = 0; i < kLanes; ++i) {
      if (i & step) continue;
      const Vec a = rows[i], b = rows[i + step];
      rows[i] = permute(a, b, low);
      rows[i + step] = permute(a, b, high);
    }
    transpose<step / 2>(rows);
  }
}

// packed[k, column] = source[column, k] for the first `columns` columns and zeros up to a multiple of
// kLanes, `width` floats apart. What passes a row's width is overwritten by the next, so `packed` has
// room for kLanes more at its end.
template <class T>
inline void pack(const T* source, int64_t stride, int64_t columns, int64_t depth, int64_t width,
                 float* packed) {
  for (int64_t k = 0; k < depth; k += kLanes) {
    const int64_t rows = smaller(kLanes, depth - k);
    for (int64_t column = 0; column < width; column += kLanes) {
      Vec square[kLanes] = {};
      for (int i = 0; i < smaller(kLanes, columns - column); ++i) {
        square[i] = load_up_to(source + (column + i) * stride + k, depth - k);
      }
      transpose(square);
      for (int i = 0; i < rows; ++i) store(packed + (k + i) * width + column, square[i]);
    }
  }
}

// sums[row, out] = sum_k tile[k, row] * panel[k, out]
template <int rows>
void multiply_tile(const float* tile, const float* panel, int64_t depth, float* sums) {
  Vec total[rows][2] = {};
  for (int64_t k = 0; k < depth; ++k, tile += rows, panel += kPanelOuts) {
    const Vec first = load(panel), second = load(panel + kLanes);
    for (int i = 0; i < rows; ++i) {
      const Vec x = splat(tile[i]);
      total[i][0] += x * first;
      total[i][1] += x * second;
    }
  }
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

// Splits `tokens` rows from `first` on into tiles whose heights differ by at most one.
struct Tiles {
  int64_t first, tokens, count, in_features;

  int64_t begin(int64_t tile) const { return first + tokens * tile / count; }
  int64_t rows(int64_t tile) const { return begin(tile + 1) - begin(tile); }
  int64_t floats() const { return kTileRows * in_features + kLanes; }
};

void multiply_tiles(const LinearArguments& a, Workers& workers, const Tiles& tiles) {
  const size_t tile_bytes = static_cast<size_t>(tiles.floats()) * sizeof(float);
  float* packed = static_cast<float*>(workers.shared_scratch(static_cast<size_t>(tiles.count) * tile_bytes));
  workers.for_each(static_cast<size_t>(tiles.count), [&](size_t index, int) {
    const int64_t tile = static_cast<int64_t>(index);
    with_float_type(a.dtype, [&](auto element) {
      const auto* input = static_cast<const decltype(element)*>(a.input) + tiles.begin(tile) * a.input_stride;
      const int64_t rows = tiles.rows(tile);
      pack(input, a.input_stride, rows, a.in_features, rows, packed + tile * tiles.floats());
    });
  });
  workers.for_each(static_cast<size_t>(divide_up(a.out_features, kPanelOuts)), [&](size_t index, int worker) {
    const int64_t begin = static_cast<int64_t>(index) * kPanelOuts;
    const int64_t outs = smaller(kPanelOuts, a.out_features - begin);
    const size_t panel_bytes = static_cast<size_t>(kPanelOuts * a.in_features + kLanes) * sizeof(float);
    float* panel = static_cast<float*>(workers.scratch(worker, panel_bytes));
    with_float_type(a.weight_dtype, [&](auto element) {
      const auto* weight = static_cast<const decltype(element)*>(a.weight) + begin * a.weight_stride;
      pack(weight, a.weight_stride, outs, a.in_features, kPanelOuts, panel);
    });
    float bias[kPanelOuts];
    read_bias(a, begin, outs, bias);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      alignas(64) float sums[kTileRows * kPanelOuts];
      const int64_t rows = tiles.rows(tile);
      multiply_tile_of<kTileRows>(rows)(packed + tile * tiles.floats(), panel, a.in_features, sums);
      with_float_type(a.dtype, [&](auto element) {
        for (int64_t i = 0; i < rows; ++i) {
          write_sums<decltype(element)>(a, tiles.begin(tile) + i, begin, outs, sums + i * kPanelOuts, bias);
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
    if (tokens > 0) multiply_tiles(a, workers, {first, tokens, divide_up(tokens, kTileRows), a.in_features});
  }
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
