// Which keys are a row's interior, and which elements of the interior are sampled. The numbers are the same on every
// device.
#pragma once

#include "kernels/decompose-attention/decompose-attention.h"
#include "shared/random/philox.h"

namespace kv {
namespace KV_ISA {

// An element of the interior: a row and one of its keys.
struct InteriorSample {
  int32_t row;
  int32_t key;
};

// The functions are constexpr, so that a CUDA device may evaluate them too.
struct Interior {
  int32_t tokens;
  int32_t first_row;  // the first row of this call
  int32_t sinks;
  int32_t diagonal;
  int64_t sampled;  // elements that earlier calls have drawn from

  constexpr explicit Interior(const DecomposeAttentionArguments& a)
      : tokens(a.tokens), first_row(a.tokens - a.rows), sinks(a.sink_tokens), diagonal(a.diagonal_tokens),
        sampled(a.seen_tokens > 0 ? all_elements() - own_elements() : 0) {}

  // The interior of a row is the keys `sinks` .. end(row) - 1.
  constexpr int32_t end(int32_t row) const {
    const int32_t behind = row + 1 - diagonal;
    return behind > sinks ? behind : sinks;
  }
  constexpr int32_t count(int32_t row) const { return end(row) - sinks; }
  constexpr bool empty() const { return count(tokens - 1) == 0; }

  // The number of elements in the first `rows` rows that have an interior. Each row has one element more than the row
  // before.
  static constexpr int64_t elements(int64_t rows) { return rows > 0 ? rows * (rows + 1) / 2 : 0; }
  constexpr int64_t all_elements() const { return elements(int64_t{tokens} - sinks - diagonal); }
  constexpr int64_t own_elements() const { return all_elements() - elements(int64_t{first_row} - sinks - diagonal); }

  // This call's samples, rounded up: its share, or fewer behind earlier calls, which drew more than their share of all. Sums
  // then vary by samples as much as those of one call with all rows so far.
  constexpr int32_t own_samples(int32_t samples) const {
    if (empty()) return 0;
    const double share =
        static_cast<double>(samples) * static_cast<double>(own_elements()) / static_cast<double>(all_elements() + sampled);
    const int32_t whole = static_cast<int32_t>(share);
    return whole < share ? whole + 1 : whole;
  }

  // Draws one element from each of `count` equal ranges of this call's elements, numbered row by row (line 1).
  constexpr InteriorSample sample(int32_t index, int32_t count, uint64_t seed) const {
    const int64_t own = own_elements();
    const double width = static_cast<double>(own) / count;
    const int64_t start = static_cast<int64_t>(index * width);
    const int64_t stop = static_cast<int64_t>((index + 1) * width);
    const double random = static_cast<double>(random_53_bits(seed, (static_cast<uint64_t>(first_row) << 24) + static_cast<uint64_t>(index))) * 0x1p-53;
    const int64_t drawn = start + static_cast<int64_t>(random * static_cast<double>(stop > start ? stop - start : 1));
    const int64_t element = all_elements() - own + (drawn < own ? drawn : own - 1);
    // Finds the last row whose elements begin at or before `element`.
    int64_t row = 0;
    for (int64_t above = int64_t{tokens} - sinks - diagonal; above - row > 1;) {
      const int64_t middle = (row + above) / 2;
      (elements(middle) <= element ? row : above) = middle;
    }
    return {static_cast<int32_t>(row + sinks + diagonal), static_cast<int32_t>(element - elements(row) + sinks)};
  }
};

// The two dims of a head that pair `pair` rotates.
constexpr int32_t first_of_pair(const DecomposeAttentionArguments& a, int32_t pair) {
  return a.convention == RopeConvention::interleaved ? 2 * pair : pair;
}
constexpr int32_t second_of_pair(const DecomposeAttentionArguments& a, int32_t pair) {
  return a.convention == RopeConvention::interleaved ? 2 * pair + 1 : pair + a.pairs;
}

}  // namespace KV_ISA
}  // namespace kv
