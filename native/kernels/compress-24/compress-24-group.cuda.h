// Groups of four neighbouring 16-bit elements, and which two of the four are kept. Two groups are computed at a time:
// a word holds one element of each group, and an instruction on the word acts on both. Device code.
#pragma once

#include <cstdint>

#include "ptx/arithmetic.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

constexpr uint32_t kSignBits = 0x80008000u;

struct GroupPair {
  uint32_t of[4];  // element i of one group is in the low half of of[i], that of the other in the high half
};

struct PairMasks {
  uint32_t of[4];  // 0xffff for each element that the mask selects, else 0
};

// The two stored elements of each group, in ascending order of their places. The places are nibbles of metadata, in
// bits 0 to 3 and 16 to 19.
struct KeptPair {
  uint32_t first;
  uint32_t second;
  uint32_t nibbles;
};

__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }
__device__ inline uint32_t where(uint32_t mask, uint32_t yes, uint32_t no) { return (yes & mask) | (no & ~mask); }
__device__ inline uint32_t two_of(uint32_t a, uint32_t b, uint32_t c) { return (a & b) | (c & (a | b)); }

// ---- Loading pairs of groups and their masks. ----

// The pair of groups in eight neighbouring dims of a key.
__device__ inline GroupPair key_pair(uint4 row) {
  return {low_halves(row.x, row.z), high_halves(row.x, row.z), low_halves(row.y, row.w), high_halves(row.y, row.w)};
}

// The pair of groups in four tokens' values, in dims 2 * pair and 2 * pair + 1 of eight.
__device__ inline GroupPair value_pair(const uint4 (&tokens)[4], int pair) {
  const auto word = [&](int i) {
    const uint4& row = tokens[i];
    return pair == 0 ? row.x : pair == 1 ? row.y : pair == 2 ? row.z : row.w;
  };
  return {word(0), word(1), word(2), word(3)};
}

// The masks of the same elements. A byte of the mask that is not zero keeps its element.
__device__ inline PairMasks key_mask(uint2 row) {
  const uint32_t low = __vcmpne4(row.x, 0);
  const uint32_t high = __vcmpne4(row.y, 0);
  return {__byte_perm(low, high, 0x4400), __byte_perm(low, high, 0x5511), __byte_perm(low, high, 0x6622),
          __byte_perm(low, high, 0x7733)};
}
__device__ inline PairMasks value_mask(const uint2 (&tokens)[4], int pair) {
  const auto mask = [&](int i) {
    return __byte_perm(__vcmpne4(pair < 2 ? tokens[i].x : tokens[i].y, 0), 0, pair % 2 == 0 ? 0x1100 : 0x3322);
  };
  return {mask(0), mask(1), mask(2), mask(3)};
}

// ---- Which elements are kept. ----

// Selects the two elements of largest magnitude. Of equal ones, the lower index comes first.
__device__ inline PairMasks largest_two(const GroupPair& pair) {
  // For i < j, the sign bits say whether element i comes before element j. The low half never borrows from the high
  // half.
  const auto wins = [&](int i, int j) { return (pair.of[i] | kSignBits) - (pair.of[j] & ~kSignBits); };
  const uint32_t wins01 = wins(0, 1), wins02 = wins(0, 2), wins03 = wins(0, 3);
  const uint32_t wins12 = wins(1, 2), wins13 = wins(1, 3), wins23 = wins(2, 3);
  return {ptx::halves_with_sign(two_of(wins01, wins02, wins03)), ptx::halves_with_sign(two_of(~wins01, wins12, wins13)),
          ptx::halves_with_sign(two_of(~wins02, ~wins12, wins23)),
          ptx::halves_with_sign(two_of(~wins03, ~wins13, ~wins23))};
}

// The stored elements at two places. `places` must select exactly two.
__device__ inline KeptPair stored(const GroupPair& pair, const PairMasks& places) {
  const auto& [at0, at1, at2, at3] = places.of;
  const uint32_t first = where(at1, 0x00010001u, 0x00020002u) & ~at0;
  const uint32_t second = where(at2, 0x00080008u, 0x00040004u) | (at3 & 0x000c000cu);
  return {where(at0, pair.of[0], where(at1, pair.of[1], pair.of[2])),
          where(at3, pair.of[3], where(at2, pair.of[2], pair.of[1])), first | second};
}

// Keeps what a mask of at most two elements selects. If it selects fewer, zeros are stored for the lowest other
// places.
__device__ inline KeptPair keep_masked(GroupPair pair, const PairMasks& mask) {
  for (int i = 0; i < 4; ++i) pair.of[i] &= mask.of[i];
  PairMasks places = mask;
  places.of[0] |= ~two_of(mask.of[1], mask.of[2], mask.of[3]);
  places.of[1] |= ~two_of(places.of[0], mask.of[2], mask.of[3]);
  return stored(pair, places);
}

__device__ inline KeptPair keep_largest(const GroupPair& pair) { return stored(pair, largest_two(pair)); }

// The sum of the magnitudes of the elements that are not kept.
template <typename Element>
__device__ float lost(const GroupPair& pair, const PairMasks& kept) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t magnitudes = pair.of[i] & ~kept.of[i] & ~kSignBits;
    const auto low = static_cast<uint16_t>(magnitudes);
    const auto high = static_cast<uint16_t>(magnitudes >> 16);
    sum += to_float(reinterpret_cast<const Element&>(low)) + to_float(reinterpret_cast<const Element&>(high));
  }
  return sum;
}

}  // namespace kv
