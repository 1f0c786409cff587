// The product for few rows of input, bound by reading the weights: each row of weights is read once,
// in memory order, and widened once for a group of input rows. Lanes run along the input features, so
// the weights need no packing.
#pragma once

#include "kernels/linear/linear-rows.cpu.h"
#include "runtime/workers.h"

namespace kv {
namespace KV_ISA {
namespace {

// Input rows in registers at once, and running sums of each: an FMA takes several issues to finish.
// A row's terms are added in the same order in a group of any size.
constexpr int kGroupRows = kLanes == 16 ? 8 : 4;
constexpr int kChains = 2;
// So many input rows leave registers for the sums of two weight rows.
constexpr int kPairedRows = kGroupRows / 2;
static_assert(kMostMemoryStreams == 4, "dot_rows_together has a case for each number of weight rows");
// Weights are asked for this far ahead of their use, which is further than hardware looks: in the first cache, without a
// place in the second, so that the input keeps its place. Or first in the second cache, where more can be on their way.
constexpr int64_t kAhead = 7 << 10;
constexpr int64_t kAheadOfFirst = 2 << 10;
constexpr int64_t kAheadOfSecond = 16 << 10;
constexpr int kNoReuse = 0;
constexpr int kSecondCache = 2;
constexpr int64_t kMostChunkOuts = 256;
// A row of more than kMostFewFloats leaves the first cache between two rows of weights. So more of these share it where
// there are registers for their sums, and what is asked for ahead is shared among them.
constexpr int kSharingRows = kLanes == 16 ? 8 : 1;

// Asks for what is read after the line, so far ahead that all of `streams` together are as far as the constants say.
template <int cache, int streams>
__attribute__((always_inline)) inline void fetch(const char* line) {
  if (cache == 2) __builtin_prefetch(line + kAheadOfSecond / streams, 0, kSecondCache);
  __builtin_prefetch(line + (cache == 2 ? kAheadOfFirst : kAhead) / streams, 0, kNoReuse);
}

// dots[row][out] = the scalar product of each of a packed group of input rows with each of `outs` weight
// rows. Each weight row is a stream of memory. How many a core should fetch at once depends on the processor.
template <int rows, int outs, int cache, class W>
void dot_rows(const float* group, const W* weight, int64_t weight_stride, int64_t in_features, float* dots,
              int64_t dots_stride) {
  constexpr int streams = outs > kMostMemoryStreams ? outs : 1;
  Vec total[outs][rows][kChains] = {};
  int64_t k = 0;
  for (; k + kChains * kLanes <= in_features; k += kChains * kLanes) {
    for (int out = 0; out < outs; ++out) {
      const W* row = weight + out * weight_stride + k;
      for (size_t byte = 0; byte < kChains * kLanes * sizeof(W); byte += 64) {
        fetch<cache, streams>(reinterpret_cast<const char*>(row) + byte);
      }
      for (int chain = 0; chain < kChains; ++chain) {
        const Vec w = load(row + chain * kLanes);
        const float* inputs = group + (k + chain * kLanes) * rows;
        for (int i = 0; i < rows; ++i) total[out][i][chain] += load(inputs + i * kLanes) * w;
      }
    }
  }
  for (; k < in_features; k += kLanes) {
    for (int out = 0; out < outs; ++out) {
      const Vec w = load_up_to(weight + out * weight_stride + k, in_features - k);
      for (int i = 0; i < rows; ++i) total[out][i][0] += load(group + k * rows + i * kLanes) * w;
    }
  }
#pragma GCC unroll 8
  for (int out = 0; out < outs; ++out) {
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) dots[i * dots_stride + out] = horizontal_sum(total[out][i][0] + total[out][i][1]);
  }
}

template <int rows, int outs, int cache, class W>
inline auto dot_rows_of(int64_t count) {
  if constexpr (rows == 1) {
    return dot_rows<1, outs, cache, W>;
  } else {
    return count == rows ? dot_rows<rows, outs, cache, W> : dot_rows_of<rows - 1, outs, cache, W>(count);
  }
}

// How many weight rows are read at once.
int64_t most_together(const LinearArguments& a, const Workers& workers) {
  if (kSharingRows > 1 && a.tokens == 1 && a.in_features > kMostFewFloats) return kSharingRows;
  return smaller(workers.memory_reading().streams, a.tokens == 1 ? kMostMemoryStreams : a.tokens <= kPairedRows ? 2 : 1);
}

// dot_rows for up to kGroupRows input rows and as many weight rows as most_together says, or fewer.
template <int cache, class W>
auto dot_rows_together(int64_t rows, int64_t together) {
  if constexpr (kSharingRows == 8) {
    if (together == 8) return dot_rows<1, 8, cache, W>;
  }
  if (together == 4) return dot_rows<1, 4, cache, W>;
  if (together == 2) return dot_rows_of<kPairedRows, 2, cache, W>(rows);
  return dot_rows_of<kGroupRows, 1, cache, W>(rows);
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
      int64_t out = 0;
      for (int64_t together = most_together(a, workers); together > 0; together /= 2) {
        for (; out + together <= outs; out += together) {
          for (int64_t row = 0; row < a.tokens; row += kGroupRows) {
            const int64_t rows = smaller(a.tokens - row, kGroupRows);
            const auto dot = workers.memory_reading().cache == 1 ? dot_rows_together<1, W>(rows, together)
                                                                 : dot_rows_together<2, W>(rows, together);
            dot(groups + row * padded, weight + out * a.weight_stride, a.weight_stride, a.in_features,
                sums + row * chunk + out, chunk);
          }
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
