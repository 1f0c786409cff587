// The product for few rows of input, bound by reading the weights: each row of weights is read once,
// in memory order, and widened once for a group of input rows. Lanes run along the input features, so
// the weights need no packing.
#pragma once

#include "kernels/linear/linear-rows.h"

namespace kv {
namespace KV_ISA {
namespace {

// Few enough for the input to stay in a first-level cache while the weights pass through it.
constexpr int64_t kMostFewRows = 16;
constexpr int64_t kMostFewFloats = 8 << 10;
// Input rows in registers at once, and running sums of each: an FMA takes several issues to finish.
// A row's terms are added in the same order in a group of any size.
constexpr int kGroupRows = kLanes == 16 ? 8 : 4;
constexpr int kChains = 2;
// Weights are asked for this far ahead of their use: further than hardware looks.
constexpr int64_t kPrefetchAhead = 8 << 10;
constexpr int64_t kMostChunkOuts = 256;

// dots[row] = the scalar product of one weight row with each of a packed group of input rows.
template <int rows, class W>
void dot_rows(const float* group, const W* weight, int64_t in_features, float* dots, int64_t dots_stride) {
  Vec total[rows][kChains] = {};
  int64_t k = 0;
  for (; k + kChains * kLanes <= in_features; k += kChains * kLanes) {
    for (size_t byte = 0; byte < kChains * kLanes * sizeof(W); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(weight + k) + byte + kPrefetchAhead);
    }
    for (int chain = 0; chain < kChains; ++chain) {
      const int64_t offset = k + chain * kLanes;
      const Vec w = load(weight + offset);
      for (int i = 0; i < rows; ++i) total[i][chain] += load(group + offset * rows + i * kLanes) * w;
    }
  }
  for (; k < in_features; k += kLanes) {
    const Vec w = load_up_to(weight + k, in_features - k);
    for (int i = 0; i < rows; ++i) total[i][0] += load(group + k * rows + i * kLanes) * w;
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) dots[i * dots_stride] = horizontal_sum(total[i][0] + total[i][1]);
}

template <int rows, class W>
inline auto dot_rows_of(int64_t count) {
  if constexpr (rows == 1) {
    return dot_rows<1, W>;
  } else {
    return count == rows ? dot_rows<rows, W> : dot_rows_of<rows - 1, W>(count);
  }
}

bool are_few_rows(const LinearArguments& a) {
  return a.tokens == 1 || (a.tokens <= kMostFewRows && a.tokens * a.in_features <= kMostFewFloats);
}

void multiply_few_rows(const LinearArguments& a, Workers& workers) {
  const int64_t padded = round_up(a.in_features, kLanes);
  const size_t group_bytes = static_cast<size_t>(a.tokens * padded) * sizeof(float);
  float* groups = static_cast<float*>(workers.shared_scratch(group_bytes));
  for (int64_t row = 0; row < a.tokens; row += kGroupRows) {
    pack_rows(a, row, smaller(a.tokens - row, kGroupRows), groups + row * padded);
  }
  const int64_t chunk = smaller(kMostChunkOuts, divide_up(a.out_features, 4 * workers.count()));
  workers.for_each(static_cast<size_t>(divide_up(a.out_features, chunk)), [&](size_t index, int) {
    const int64_t begin = static_cast<int64_t>(index) * chunk;
    const int64_t outs = smaller(chunk, a.out_features - begin);
    float sums[kMostFewRows * kMostChunkOuts];
    with_float_type(a.weight_dtype, [&](auto element) {
      using W = decltype(element);
      const W* weight = static_cast<const W*>(a.weight) + begin * a.weight_stride;
      for (int64_t out = 0; out < outs; ++out, weight += a.weight_stride) {
        for (int64_t row = 0; row < a.tokens; row += kGroupRows) {
          const auto dot = dot_rows_of<kGroupRows, W>(smaller(a.tokens - row, kGroupRows));
          dot(groups + row * padded, weight, a.in_features, sums + row * chunk + out, chunk);
        }
      }
    });
    float bias[kMostChunkOuts];
    read_bias(a, begin, outs, bias);
    with_float_type(a.dtype, [&](auto element) {
      for (int64_t row = 0; row < a.tokens; ++row) {
        write_sums<decltype(element)>(a, row, begin, outs, sums + row * chunk, bias);
      }
    });
  });
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
