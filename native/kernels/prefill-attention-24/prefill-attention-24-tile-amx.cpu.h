// Writes out 2:4 sparse blocks of keys or values as dense tiles for tile registers, with zeros where none was kept.
#pragma once

#include "shared/attention/prefill/key-tile-amx.cpu.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {
namespace KV_ISA {

static_assert(kTileKeys == kBlock24Tokens, "a tile is a block");

// A line of 32 numbers of which the 16 of `kept` were kept. `meta` are the nibbles of their eight groups of four.
inline Numbers write_out(__m256i kept, uint32_t meta) {
  typedef uint64_t Groups __attribute__((vector_size(64)));
  const Groups pairs = reinterpret_cast<Groups>(_mm512_maskz_cvtepu32_epi64(0xff, kept));
  const Groups nibbles = (Groups{} + meta) >> Groups{0, 4, 8, 12, 16, 20, 24, 28};
  const Groups line = (pairs & 0xffff) << (nibbles << 4 & 48) | pairs >> 16 << (nibbles << 2 & 48);
  return reinterpret_cast<Numbers>(line);
}

inline uint32_t meta_at(const uint32_t* metadata, Meta16Place place) { return metadata[place.word] >> place.shift & 0xffff; }

// Two runs of eight numbers.
inline __m256i load_kept(const Bfloat* first, const Bfloat* second) {
  __m128i low, high;
  std::memcpy(&low, first, sizeof low);
  std::memcpy(&high, second, sizeof high);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

inline PackedTile pack_sparse_keys(const Bfloat* non_zeros, const uint32_t* metadata, int dim, float* memory) {
  PackedTile tile(kTileKeys, dim, memory);
  for (int key = 0; key < kTileKeys; ++key) {
    for (int d = 0; d < dim; d += kBlock) {
      const __m256i kept = load_kept(non_zeros + key_non_zero(key, d / 2, dim), non_zeros + key_non_zero(key, d / 2 + 8, dim));
      const uint32_t meta = meta_at(metadata, key_meta16(key, d / 16, dim)) | meta_at(metadata, key_meta16(key, d / 16 + 1, dim)) << 16;
      tile.write(key, d, write_out(kept, meta));
    }
  }
  tile.finish();
  return tile;
}

inline PackedTile pack_sparse_values(const Bfloat* non_zeros, const uint32_t* metadata, int dim, float* memory) {
  PackedTile tile(dim, kTileKeys, memory);
  for (int d = 0; d < dim; d += kTile) {
    // Of each dim, the pairs of tokens that were kept of each four.
    Vec lines[kTile];
    for (int i = 0; i < kTile; ++i) {
      const auto kept = [&](int token) {
        return _mm512_maskz_cvtepu16_epi32(kAllLanes, load_kept(non_zeros + value_non_zero(token, d), non_zeros + value_non_zero(token, d + 8)));
      };
      lines[i] = reinterpret_cast<Vec>(reinterpret_cast<VecInt>(kept(2 * i)) | reinterpret_cast<VecInt>(kept(2 * i + 1)) << 16);
    }
    transpose(lines);
    for (int i = 0; i < kTile; ++i) {
      for (int half = 0; half < kTileKeyBlocks; ++half) {
        __m256i kept;
        std::memcpy(&kept, reinterpret_cast<const char*>(&lines[i]) + half * sizeof kept, sizeof kept);
        const uint32_t meta = meta_at(metadata, value_meta16(d + i, 2 * half)) | meta_at(metadata, value_meta16(d + i, 2 * half + 1)) << 16;
        tile.write(d + i, half * kBlock, write_out(kept, meta));
      }
    }
  }
  tile.finish();
  return tile;
}

}  // namespace KV_ISA
}  // namespace kv
