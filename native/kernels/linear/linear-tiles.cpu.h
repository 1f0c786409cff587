// The product for many rows on tile registers, which multiply bf16 numbers 16 rows x 32 features x 16 outputs at a
// time. Input and weights are scaled and split into bf16 parts, so that the result is that of f32 arithmetic.
//
// A block is two tiles: 32 rows, or 32 output features, of 32 input features. A task takes some blocks of outputs. It
// goes over the input features in chunks: it packs the weights of a chunk, which stay in L2, multiplies all rows with
// them, and keeps the sums of all its outputs in L2 meanwhile.
#pragma once

#include "kernels/linear/linear-many-rows.cpu.h"
#include "shared/cpu/bf16-parts.cpu.h"
#include KV_TILES

namespace kv {
namespace KV_ISA {
namespace {

static_assert(kLanes == 16, "a row of a tile is one vector of sums");
constexpr int kTile = 16;
constexpr int kBlock = 2 * kTile;
// bf16 numbers of a tile, and of a block's two.
constexpr int64_t kTileNumbers = kTile * kBlock;
constexpr int64_t kBlockNumbers = 2 * kTileNumbers;
// f32 sums of a block of rows and a block of outputs: four tiles, [row half, out half, row, out].
constexpr int64_t kBlockSums = kBlock * kBlock;
constexpr int64_t kTaskBlocks = 4;
// Blocks of input features: the input of one block of rows, 24 KiB, stays in L1 for all outputs of the task.
constexpr int64_t kChunkBlocks = 4;
// The sums of so many rows, 16 KiB for each 32, leave room in L2.
constexpr int64_t kPassRows = 512;

// Fewer input features would add more roundings to a sum than f32 arithmetic does.
inline bool fills_tiles(const LinearArguments& a) { return a.in_features >= kBlock; }

// scales[i] of each of `rows` rows of `features` numbers.
template <class T>
inline void find_scales(const T* row, int64_t stride, int64_t rows, int64_t features, int32_t* scales) {
  constexpr int kChains = 4;
  for (int64_t i = 0; i < rows; ++i, row += stride) {
    // The range of f16 is so small that one scale serves all its rows.
    if constexpr (kParts<T> == kParts<Half>) {
      scales[i] = scale_of(65504.0f);
      continue;
    }
    Vec largest[kChains] = {};
    for (int64_t k = 0; k < features; k += kChains * kLanes) {
      for (int chain = 0; chain < kChains; ++chain) {
        const int64_t first = k + chain * kLanes;
        if (first >= features) break;
        const VecInt bits = reinterpret_cast<VecInt>(load_up_to(row + first, features - first)) & 0x7fffffff;
        largest[chain] = maximum(largest[chain], reinterpret_cast<Vec>(bits));
      }
    }
    const Vec pair = maximum(largest[0], largest[1]), other = maximum(largest[2], largest[3]);
    scales[i] = scale_of(horizontal_maximum(maximum(pair, other)));
  }
}

// block[part, row, feature] = parts of 2^scale * row[feature]; zeros from row `rows` and feature `features` on.
template <class T>
inline void split_block(const T* row, int64_t stride, int64_t rows, int64_t features, const int32_t* scales,
                        uint16_t* block) {
  constexpr int parts = kParts<T>;
  for (int64_t i = 0; i < kBlock; ++i) {
    for (int64_t k = 0; k < kBlock; k += kLanes) {
      Vec x = {};
      if (i < rows && k < features) {
        x = load_up_to(row + i * stride + k, features - k) * power_of_two(VecInt{} + scales[i]);
      }
      Vec part[parts];
      split<parts>(x, part);
      for (int p = 0; p < parts; ++p) store_upper_halves(block + p * kBlockNumbers + i * kBlock + k, part[p]);
    }
  }
}

// Turns a tile [row, pair of numbers] into [pair of numbers, row].
inline void transpose_tile(uint16_t* tile) {
  Vec rows[kTile];
  for (int i = 0; i < kTile; ++i) std::memcpy(&rows[i], tile + i * kBlock, sizeof rows[i]);
  transpose(rows);
  for (int i = 0; i < kTile; ++i) std::memcpy(tile + i * kBlock, &rows[i], sizeof rows[i]);
}

// sums[row, out] += input[row, :] . weight[out, :] over `depth` blocks of features.
inline void multiply_blocks(TileRegisters& tiles, const uint16_t* input, int input_parts, const uint16_t* weight, int weight_parts,
                            int64_t depth, float* sums) {
  constexpr int64_t kTileSums = kTile * kTile;
  tiles.load<0>(sums);
  tiles.load<1>(sums + kTileSums);
  tiles.load<2>(sums + 2 * kTileSums);
  tiles.load<3>(sums + 3 * kTileSums);
  for (int64_t k = 0; k < depth; ++k, input += input_parts * kBlockNumbers) {
    for (int j = 0; j < weight_parts; ++j, weight += kBlockNumbers) {
      tiles.load<6>(weight);
      tiles.load<7>(weight + kTileNumbers);
      for (int i = 0; i < input_parts && i + j < kMostParts; ++i) {
        tiles.load<4>(input + i * kBlockNumbers);
        tiles.load<5>(input + i * kBlockNumbers + kTileNumbers);
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

// The rows of one pass, packed: blocks [row block, feature block, part, row, feature], and the scale of each row.
struct PackedRows {
  int64_t first, tokens, row_blocks, depth_blocks;
  int parts;
  uint16_t* blocks;
  int32_t* scales;

  int64_t row_block_numbers() const { return depth_blocks * parts * kBlockNumbers; }
};

inline void pack_block_of_rows(const LinearArguments& a, const PackedRows& packed, int64_t row_block) {
  with_float_type(a.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t begin = row_block * kBlock;
    const int64_t rows = smaller(kBlock, packed.tokens - begin);
    const T* input = static_cast<const T*>(a.input) + (packed.first + begin) * a.input_stride;
    find_scales(input, a.input_stride, rows, a.in_features, packed.scales + begin);
    uint16_t* block = packed.blocks + row_block * packed.row_block_numbers();
    for (int64_t k = 0; k < a.in_features; k += kBlock, block += kParts<T> * kBlockNumbers) {
      split_block(input + k, a.input_stride, rows, a.in_features - k, packed.scales + begin, block);
    }
  });
}

// The outputs of one block.
inline void write_block(const LinearArguments& a, const PackedRows& packed, int64_t row_block, int64_t out, int64_t outs,
                        const float* sums, const int32_t* out_scales, const float* bias) {
  const int64_t begin = row_block * kBlock;
  const int64_t rows = smaller(kBlock, packed.tokens - begin);
  for (int64_t i = 0; i < rows; ++i) {
    float line[kBlock];
    for (int half = 0; half < 2; ++half) {
      VecInt scales;
      std::memcpy(&scales, out_scales + half * kTile, sizeof scales);
      const float* sum = sums + (i / kTile * 2 + half) * kTile * kTile + i % kTile * kTile;
      store(line + half * kTile, unscale(load(sum), scales + packed.scales[begin + i]));
    }
    with_float_type(a.dtype, [&](auto element) {
      write_sums<decltype(element)>(a, packed.first + begin + i, out, outs, line, bias);
    });
  }
}

// Outputs `out` to `out + outs`, at most kTaskBlocks blocks, of the row blocks from `row_block` to `end`. `memory` has
// room for task_bytes.
template <class W>
inline void multiply_task(const LinearArguments& a, const PackedRows& packed, int64_t out, int64_t outs, int64_t row_block,
                          int64_t end, void* memory) {
  const int64_t out_blocks = divide_up(outs, kBlock);
  const int64_t row_blocks = end - row_block;
  float* sums = static_cast<float*>(memory);
  uint16_t* chunk = reinterpret_cast<uint16_t*>(sums + row_blocks * kTaskBlocks * kBlockSums);
  std::memset(sums, 0, sizeof(float) * static_cast<size_t>(row_blocks * kTaskBlocks * kBlockSums));
  const W* weight = static_cast<const W*>(a.weight) + out * a.weight_stride;
  int32_t scales[kTaskBlocks * kBlock] = {};
  find_scales(weight, a.weight_stride, outs, a.in_features, scales);

  TileRegisters tiles;
  for (int64_t k = 0; k < packed.depth_blocks; k += kChunkBlocks) {
    const int64_t depth = smaller(kChunkBlocks, packed.depth_blocks - k);
    const int64_t chunk_numbers = depth * kParts<W> * kBlockNumbers;
    for (int64_t b = 0; b < out_blocks; ++b) {
      for (int64_t d = 0; d < depth; ++d) {
        const int64_t feature = (k + d) * kBlock;
        uint16_t* block = chunk + b * chunk_numbers + d * kParts<W> * kBlockNumbers;
        split_block(weight + b * kBlock * a.weight_stride + feature, a.weight_stride, outs - b * kBlock,
                    a.in_features - feature, scales + b * kBlock, block);
        for (int tile = 0; tile < 2 * kParts<W>; ++tile) transpose_tile(block + tile * kTileNumbers);
      }
    }
    for (int64_t r = 0; r < row_blocks; ++r) {
      const uint16_t* input =
          packed.blocks + (row_block + r) * packed.row_block_numbers() + k * packed.parts * kBlockNumbers;
      for (int64_t b = 0; b < out_blocks; ++b) {
        multiply_blocks(tiles, input, packed.parts, chunk + b * chunk_numbers, kParts<W>, depth,
                        sums + (r * kTaskBlocks + b) * kBlockSums);
      }
    }
  }

  for (int64_t b = 0; b < out_blocks; ++b) {
    const int64_t begin = out + b * kBlock, count = smaller(kBlock, outs - b * kBlock);
    float bias[kBlock];
    read_bias(a, begin, count, bias);
    for (int64_t r = 0; r < row_blocks; ++r) {
      write_block(a, packed, row_block + r, begin, count, sums + (r * kTaskBlocks + b) * kBlockSums, scales + b * kBlock, bias);
    }
  }
}

inline size_t task_bytes(int64_t row_blocks, int weight_parts) {
  const int64_t chunk_numbers = kTaskBlocks * kChunkBlocks * weight_parts * kBlockNumbers;
  return static_cast<size_t>(row_blocks * kTaskBlocks * kBlockSums) * sizeof(float) +
         static_cast<size_t>(chunk_numbers) * sizeof(uint16_t);
}

inline void multiply_pass(const LinearArguments& a, Workers& workers, int64_t first, int64_t tokens) {
  PackedRows packed = {first, tokens, divide_up(tokens, kBlock), divide_up(a.in_features, kBlock), 0, nullptr, nullptr};
  with_float_type(a.dtype, [&](auto element) { packed.parts = kParts<decltype(element)>; });
  const size_t numbers = static_cast<size_t>(packed.row_blocks * packed.row_block_numbers());
  const size_t rows = static_cast<size_t>(packed.row_blocks * kBlock);
  packed.blocks = static_cast<uint16_t*>(workers.shared_scratch(numbers * sizeof(uint16_t) + rows * sizeof(int32_t)));
  packed.scales = reinterpret_cast<int32_t*>(packed.blocks + numbers);
  workers.for_each(static_cast<size_t>(packed.row_blocks),
                   [&](size_t index, int) { pack_block_of_rows(a, packed, static_cast<int64_t>(index)); });
  // With few outputs, several tasks pack the same weights and share the rows.
  const int64_t task_outs = kTaskBlocks * kBlock;
  const int64_t groups = divide_up(a.out_features, task_outs);
  const int64_t shares = smaller(divide_up(2 * workers.count(), groups), packed.row_blocks);
  workers.for_each(static_cast<size_t>(groups * shares), [&](size_t index, int worker) {
    const int64_t share = static_cast<int64_t>(index) % shares;
    const int64_t out = static_cast<int64_t>(index) / shares * task_outs;
    const int64_t begin = packed.row_blocks * share / shares, end = packed.row_blocks * (share + 1) / shares;
    with_float_type(a.weight_dtype, [&](auto element) {
      using W = decltype(element);
      void* memory = workers.scratch(worker, task_bytes(end - begin, kParts<W>));
      multiply_task<W>(a, packed, out, smaller(task_outs, a.out_features - out), begin, end, memory);
    });
  });
}

void multiply_on_tiles(const LinearArguments& a, Workers& workers) {
  const int64_t row_bytes = a.in_features * kMostParts * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t rows = smaller(kPassRows, kPackedInputBytes / row_bytes + 1);
  const int64_t passes = divide_up(a.tokens, rows);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = a.tokens * pass / passes;
    const int64_t tokens = a.tokens * (pass + 1) / passes - first;
    if (tokens > 0) multiply_pass(a, workers, first, tokens);
  }
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
