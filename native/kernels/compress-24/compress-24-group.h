// One group of four neighbouring 16-bit elements, packed in two words, and which two of them are kept. Device code.
#pragma once

#include <cstdint>

namespace kv {

struct GroupOf4 {
  uint32_t low;   // elements 0 and 1
  uint32_t high;  // elements 2 and 3
};

// The two kept elements, in ascending order of their places, and the places as a nibble of metadata.
struct KeptOf4 {
  uint32_t values;
  uint32_t nibble;
};

// The places first < second; their values.
__device__ inline KeptOf4 keep_places(GroupOf4 group, uint32_t first, uint32_t second) {
  const uint32_t bytes = 0x1010u + 0x22u * first + 0x2200u * second;
  return {__byte_perm(group.low, group.high, bytes), second << 2 | first};
}

struct Magnitudes {
  uint32_t of[4];

  __device__ explicit Magnitudes(GroupOf4 group)
      : of{group.low & 0x7fffu, group.low >> 16 & 0x7fffu, group.high & 0x7fffu, group.high >> 16 & 0x7fffu} {}
};

// Which elements are one of the two of largest magnitude, of equal ones the lower first: always two.
struct LargestTwo {
  bool kept[4];

  __device__ explicit LargestTwo(const Magnitudes& magnitude) {
    const auto wins = [&](int i, int j) { return magnitude.of[i] >= magnitude.of[j]; };  // for i < j
    const auto most = [](bool a, bool b, bool c) { return (a && b) || (a && c) || (b && c); };
    kept[0] = most(wins(0, 1), wins(0, 2), wins(0, 3));
    kept[1] = most(!wins(0, 1), wins(1, 2), wins(1, 3));
    kept[2] = most(!wins(0, 2), !wins(1, 2), wins(2, 3));
    kept[3] = most(!wins(0, 3), !wins(1, 3), !wins(2, 3));
  }
};

__device__ inline KeptOf4 keep_largest(GroupOf4 group) {
  const LargestTwo largest{Magnitudes(group)};
  const auto& kept = largest.kept;
  return keep_places(group, kept[0] ? 0 : kept[1] ? 1 : 2, kept[3] ? 3 : kept[2] ? 2 : 1);
}

// Keeps what the low four bits of `mask` say, of more than two the lowest; zeros stand at the lowest free places where
// they say less.
__device__ inline KeptOf4 keep_masked(GroupOf4 group, uint32_t mask) {
  constexpr uint64_t kNibbleOfMask = 0x498e4dcc49884444u;  // four bits for each mask
  const uint32_t nibble = kNibbleOfMask >> 4 * mask & 15u;
  const uint32_t first = nibble & 3u;
  const uint32_t second = nibble >> 2;
  KeptOf4 kept = keep_places(group, first, second);
  if ((mask >> first & 1u) == 0) kept.values &= 0xffff0000u;
  if ((mask >> second & 1u) == 0) kept.values &= 0x0000ffffu;
  return kept;
}

}  // namespace kv
