// Products of tiles, on whatever tile registers this is compiled for.
#include KV_TILES

namespace kv {
namespace KV_ISA {

// sums[16, 16] += left[16, 32] * right[32 / 2, 16, 2]
void multiply_tiles(const uint16_t* left, const uint16_t* right, float* sums) {
  TileRegisters tiles;
  tiles.load<0>(sums);
  tiles.load<4>(left);
  tiles.load<7>(right);
  tiles.multiply<0, 4, 7>();
  tiles.store<0>(sums);
}

}  // namespace KV_ISA
}  // namespace kv
