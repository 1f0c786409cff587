// Products of matrices of bf16 parts on tile registers.
//
// A block is two tiles: 32 rows of 32 numbers. Of the left matrix a tile holds 16 rows; of the right one it holds 16
// columns, as pairs of numbers: [pair, column, 2]. Sums of two blocks are four tiles: [left half, right half, 16, 16].
#pragma once

#include "shared/cpu/bf16-parts.cpu.h"
#include KV_TILES

namespace kv {
namespace KV_ISA {

static_assert(kLanes == 16, "a row of a tile is one vector of sums");
constexpr int kTile = 16;
constexpr int kBlock = 2 * kTile;
// bf16 numbers of a tile, and of a block's two.
constexpr int64_t kTileNumbers = kTile * kBlock;
constexpr int64_t kBlockNumbers = 2 * kTileNumbers;
// f32 sums of a tile, and of two blocks.
constexpr int64_t kTileSums = kTile * kTile;
constexpr int64_t kBlockSums = kBlock * kBlock;

// What is asked for in L2 while blocks are multiplied: `count` lines that lie together and a line of each of `rows` rows, for each
// block anew, each time behind those before.
struct Ahead {
  const char* lines = nullptr;
  int64_t count = 0;
  const char* row = nullptr;
  int64_t row_bytes = 0, rows = 0;

  __attribute__((always_inline)) void ask() {
    constexpr int kLine = 64, kSecondCache = 2;
    for (int64_t i = 0; i < count; ++i, lines += kLine) __builtin_prefetch(lines, 0, kSecondCache);
    for (int64_t i = 0; i < rows; ++i) __builtin_prefetch(row + i * row_bytes, 0, kSecondCache);
    row += kLine;
  }
};

// sums (+)= left . right over `depth` blocks; those of the left are [block, part, row, number], those of the right
// [block, part, pair, column, 2].
template <bool accumulate, int left_parts>
inline void multiply_blocks(TileRegisters& tiles, const uint16_t* left, const uint16_t* right, int right_parts, int64_t depth,
                            Ahead ahead, float* sums) {
  if constexpr (accumulate) {
    tiles.load<0>(sums);
    tiles.load<1>(sums + kTileSums);
    tiles.load<2>(sums + 2 * kTileSums);
    tiles.load<3>(sums + 3 * kTileSums);
  } else {
    tiles.clear<0>();
    tiles.clear<1>();
    tiles.clear<2>();
    tiles.clear<3>();
  }
  for (int64_t k = 0; k < depth; ++k, right += right_parts * kBlockNumbers) {
    ahead.ask();
    for (int i = 0; i < left_parts; ++i, left += kBlockNumbers) {
      tiles.load<4>(left);
      tiles.load<5>(left + kTileNumbers);
      for (int j = 0; j < right_parts && i + j < kMostParts; ++j) {
        tiles.load<6>(right + j * kBlockNumbers);
        tiles.load<7>(right + j * kBlockNumbers + kTileNumbers);
        tiles.multiply<0, 4, 6>();
        tiles.multiply<1, 4, 7>();
        tiles.multiply<2, 5, 6>();
        tiles.multiply<3, 5, 7>();
      }
    }
  }
  tiles.store<0>(sums);
  tiles.store<1>(sums + kTileSums);
  tiles.store<2>(sums + 2 * kTileSums);
  tiles.store<3>(sums + 3 * kTileSums);
}

}  // namespace KV_ISA
}  // namespace kv
