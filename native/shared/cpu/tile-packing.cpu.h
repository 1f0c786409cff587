// Rows of numbers as bf16 parts, in the layouts that tile registers multiply.
#pragma once

#include "shared/cpu/bf16-parts.cpu.h"
#include "shared/cpu/partial-loads.cpu.h"
#include "shared/cpu/tile-products.cpu.h"
#include "shared/cpu/transpose.cpu.h"

namespace kv {
namespace KV_ISA {

// lines[part] = parts of 2^scale * row[0 .. kBlock) in pairs; zeros from feature `features` on.
template <class T>
inline void split_row(const T* row, int64_t features, int32_t scale, Vec* lines) {
  constexpr int parts = kParts<T>;
  VecInt even = {}, odd = {};
  for (int i = 0; i < kLanes; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
  const Vec power = power_of_two(VecInt{} + scale);
  const Vec first = load_up_to(row, features) * power;
  const Vec second = features > kLanes ? load_up_to(row + kLanes, features - kLanes) * power : Vec{};
  Vec evens[parts], odds[parts];
  split<parts>(permute(first, second, even), evens);
  split<parts>(permute(first, second, odd), odds);
  for (int p = 0; p < parts; ++p) lines[p] = reinterpret_cast<Vec>(upper_halves(evens[p], odds[p]));
}

// A tile of each part, turned: block[part, pair of features, row, 2]. Each line is written once: that takes long where other
// cores hold it.
template <class T>
inline void split_turned_tile(const T* row, int64_t stride, int64_t rows, int64_t features, const int32_t* scales,
                              uint16_t* block) {
  constexpr int parts = kParts<T>;
  Vec tiles[parts][kTile];
  for (int64_t i = 0; i < kTile; ++i) {
    Vec lines[parts] = {};
    if (i < rows) split_row(row + i * stride, features, scales[i], lines);
    for (int p = 0; p < parts; ++p) tiles[p][i] = lines[p];
  }
  for (int p = 0; p < parts; ++p, block += kBlockNumbers) {
    transpose(tiles[p]);
    for (int i = 0; i < kTile; ++i) std::memcpy(block + i * kBlock, &tiles[p][i], sizeof tiles[p][i]);
  }
}

// A bf16 number that is not zero and not between 2^-100 and 2^60. Products of all others with scaled numbers stay far from the
// ends of f32's range.
constexpr uint16_t kLeastNear = (127 - 100) << 7, kNearRange = (60 + 100) << 7;
inline bool is_far(uint16_t bits) {
  bits &= 0x7fff;
  return bits != 0 && static_cast<uint16_t>(bits - kLeastNear) >= kNearRange;
}

// bf16 numbers of a row of a tile.
typedef uint16_t Numbers __attribute__((vector_size(4 * kLanes)));

// Whether one of all numbers seen so far is far.
class NumbersSeen {
 public:
  void add(Numbers bits) {
    bits &= 0x7fff;
    most_ = bits > most_ ? bits : most_;
    --bits;  // so that zero is the largest
    least_ = bits < least_ ? bits : least_;
  }
  bool any_far() const {
    bool any = false;
    for (int i = 0; i < 2 * kLanes; ++i) any |= most_[i] >= kLeastNear + kNearRange || least_[i] < kLeastNear - 1;
    return any;
  }

 private:
  Numbers most_ = {}, least_ = ~Numbers{};
};

}  // namespace KV_ISA
}  // namespace kv
