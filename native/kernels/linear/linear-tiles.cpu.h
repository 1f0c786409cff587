// The product for many rows on tile registers, which multiply bf16 numbers 16 outputs x 32 features x 16 rows at a time.
// Weights are the left factor, which holds them as they lie: those in bf16 are copied. All other numbers are scaled and
// split into bf16 parts, so that the result is that of f32 arithmetic.
//
// A block is two tiles: 32 output features, or 32 rows, of 32 input features. The input is packed once. A task takes
// some blocks of outputs and of rows, and goes over the input features in chunks. It keeps the sums in L2 meanwhile.
#pragma once

#include "kernels/linear/linear-rows.cpu.h"
#include "shared/cpu/tile-products.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// The most blocks of outputs of a task, and of input features of a chunk: their weights, and the sums of all rows, leave
// room in L2.
constexpr int64_t kMostTaskBlocks = 8;
constexpr int64_t kChunkBlocks = 16;
constexpr int64_t kPassRows = 512;
constexpr int64_t kPackedRowsBytes = 32 << 20;

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

// The rows of one pass, packed: blocks [row block, feature block, part, pair of features, row, 2], and the scale of each row.
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
      for (int tile = 0; tile < 2 * kParts<T>; ++tile) transpose_tile(block + tile * kTileNumbers);
    }
  });
}

// The outputs of one block.
inline void write_block(const LinearArguments& a, const PackedRows& packed, int64_t row_block, int64_t out, int64_t outs,
                        const float* sums, const int32_t* out_scales, const float* bias) {
  for (int row_half = 0; row_half < 2; ++row_half) {
    const int64_t begin = row_block * kBlock + row_half * kTile;
    Vec lines[2][kTile];
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < kTile; ++i) lines[half][i] = load(sums + (half * 2 + row_half) * kTileSums + i * kTile);
      transpose(lines[half]);
    }
    for (int64_t i = 0; i < kTile && begin + i < packed.tokens; ++i) {
      float line[kBlock];
      for (int half = 0; half < 2; ++half) {
        VecInt scales;
        std::memcpy(&scales, out_scales + half * kTile, sizeof scales);
        store(line + half * kTile, unscale(lines[half][i], scales + packed.scales[begin + i]));
      }
      with_float_type(a.dtype, [&](auto element) {
        write_sums<decltype(element)>(a, packed.first + begin + i, out, outs, line, bias);
      });
    }
  }
}

// Outputs and rows of one task, in blocks.
struct TileTask {
  int64_t out, out_blocks, row_block, end;
};

// Whether the rows of a block are bf16 numbers whose products with scaled ones stay far from the ends of f32's range: each
// is zero, or between 2^-100 and 2^60.
template <class W>
inline bool needs_no_scale(const W* row, int64_t stride, int64_t rows, int64_t features) {
  if constexpr (kParts<W> != 1) {
    return false;
  } else {
    constexpr int kNumbers = 2 * kLanes;
    typedef uint16_t Numbers __attribute__((vector_size(kNumbers * 2)));
    constexpr uint16_t kLeast = (127 - 100) << 7, kRange = (60 + 100) << 7;
    Numbers outside = {};
    for (int64_t i = 0; i < rows; ++i, row += stride) {
      for (int64_t k = 0; k < features; k += kNumbers) {
        Numbers bits = {};
        std::memcpy(&bits, row + k, sizeof(W) * static_cast<size_t>(smaller(kNumbers, features - k)));
        bits &= 0x7fff;
        outside |= reinterpret_cast<Numbers>((bits - kLeast >= kRange) & (bits != 0));
      }
    }
    uint64_t words[kNumbers / 4], any = 0;
    std::memcpy(words, &outside, sizeof words);
    for (const uint64_t word : words) any |= word;
    return any == 0;
  }
}

// to[row, feature] of a block of bf16 rows; zeros from row `rows` and feature `features` on.
inline void copy_block(const Bfloat* row, int64_t stride, int64_t rows, int64_t features, uint16_t* to) {
  for (int64_t i = 0; i < kBlock; ++i, to += kBlock) {
    if (i < rows && features >= kBlock) {
      std::memcpy(to, row + i * stride, kBlock * sizeof *to);
      continue;
    }
    std::memset(to, 0, kBlock * sizeof *to);
    if (i < rows) std::memcpy(to, row + i * stride, static_cast<size_t>(features) * sizeof *to);
  }
}

// The weights of a task.
template <class W>
struct TaskWeights {
  const W* first;
  int64_t stride, outs, features;
  bool copied[kMostTaskBlocks];
  int32_t scales[kMostTaskBlocks * kBlock];

  TaskWeights(const LinearArguments& a, const TileTask& task)
      : first(static_cast<const W*>(a.weight) + task.out * a.weight_stride),
        stride(a.weight_stride),
        outs(a.out_features - task.out),
        features(a.in_features),
        scales() {
    for (int64_t b = 0; b < task.out_blocks; ++b) {
      const W* row = first + b * kBlock * stride;
      const int64_t rows = smaller(kBlock, outs - b * kBlock);
      copied[b] = needs_no_scale(row, stride, rows, features);
      if (!copied[b]) find_scales(row, stride, rows, features, scales + b * kBlock);
    }
  }

  // Blocks [feature block, part, out, feature] of block `b` of outputs, from `feature` on.
  void pack(int64_t b, int64_t feature, int64_t depth, uint16_t* to) const {
    const int64_t rows = outs - b * kBlock;
    for (int64_t d = 0; d < depth; ++d, feature += kBlock, to += kParts<W> * kBlockNumbers) {
      const W* from = first + b * kBlock * stride + feature;
      if constexpr (kParts<W> == 1) {
        if (copied[b]) {
          copy_block(from, stride, rows, features - feature, to);
          continue;
        }
      }
      split_block(from, stride, rows, features - feature, scales + b * kBlock, to);
    }
  }
};

template <class W>
inline void multiply_task(const LinearArguments& a, const PackedRows& packed, const TileTask& task, void* memory) {
  const int64_t row_blocks = task.end - task.row_block;
  float* sums = static_cast<float*>(memory);
  uint16_t* chunk = reinterpret_cast<uint16_t*>(sums + row_blocks * task.out_blocks * kBlockSums);
  const TaskWeights<W> weights(a, task);

  TileRegisters tiles;
  for (int64_t k = 0; k < packed.depth_blocks; k += kChunkBlocks) {
    const int64_t depth = smaller(kChunkBlocks, packed.depth_blocks - k);
    const int64_t chunk_numbers = depth * kParts<W> * kBlockNumbers;
    for (int64_t b = 0; b < task.out_blocks; ++b) weights.pack(b, k * kBlock, depth, chunk + b * chunk_numbers);
    for (int64_t r = 0; r < row_blocks; ++r) {
      const uint16_t* input =
          packed.blocks + (task.row_block + r) * packed.row_block_numbers() + k * packed.parts * kBlockNumbers;
      for (int64_t b = 0; b < task.out_blocks; ++b) {
        const auto multiply = k == 0 ? multiply_blocks<false, kParts<W>> : multiply_blocks<true, kParts<W>>;
        multiply(tiles, chunk + b * chunk_numbers, input, packed.parts, depth, sums + (r * task.out_blocks + b) * kBlockSums);
      }
    }
  }

  for (int64_t r = 0; r < row_blocks; ++r) {
    for (int64_t b = 0; b < task.out_blocks; ++b) {
      const int64_t begin = task.out + b * kBlock, count = smaller(kBlock, a.out_features - begin);
      float bias[kBlock];
      read_bias(a, begin, count, bias);
      write_block(a, packed, task.row_block + r, begin, count, sums + (r * task.out_blocks + b) * kBlockSums,
                  weights.scales + b * kBlock, bias);
    }
  }
}

inline size_t task_bytes(int64_t row_blocks, int64_t out_blocks, int weight_parts) {
  return static_cast<size_t>(row_blocks * out_blocks * kBlockSums) * sizeof(float) +
         static_cast<size_t>(out_blocks * kChunkBlocks * weight_parts * kBlockNumbers) * sizeof(uint16_t);
}

// How outputs and rows are shared out: blocks of outputs of a task, and shares of the rows.
struct TileShares {
  int64_t task_blocks, groups, shares;

  // Enough tasks for the workers; of those ways, the one that reads and packs least for each product.
  TileShares(int64_t out_blocks, int64_t row_blocks, int workers, bool splits) {
    int64_t least = 0;
    for (int64_t blocks = kMostTaskBlocks; blocks > 0; blocks /= 2) {
      const int64_t of_outs = divide_up(out_blocks, blocks);
      const int64_t of_rows = smaller(divide_up(2 * workers, of_outs), row_blocks);
      // An input number is three parts, a weight one. To copy a weight costs about as much as to read two, to split it eight.
      const int64_t cost = 3 * out_blocks * row_blocks / blocks + (splits ? 9 : 3) * out_blocks * of_rows;
      if (least != 0 && cost >= least) continue;
      least = cost;
      task_blocks = blocks;
      groups = of_outs;
      shares = of_rows;
    }
  }
};

inline void multiply_pass(const LinearArguments& a, Workers& workers, int64_t first, int64_t tokens) {
  const int64_t out_blocks = divide_up(a.out_features, kBlock);
  PackedRows packed = {first, tokens, divide_up(tokens, kBlock), divide_up(a.in_features, kBlock), 0, nullptr, nullptr};
  with_float_type(a.dtype, [&](auto element) { packed.parts = kParts<decltype(element)>; });
  const size_t numbers = static_cast<size_t>(packed.row_blocks * packed.row_block_numbers());
  const size_t rows = static_cast<size_t>(packed.row_blocks * kBlock);
  packed.blocks = static_cast<uint16_t*>(workers.shared_scratch(numbers * sizeof(uint16_t) + rows * sizeof(int32_t)));
  packed.scales = reinterpret_cast<int32_t*>(packed.blocks + numbers);
  workers.for_each(static_cast<size_t>(packed.row_blocks),
                   [&](size_t index, int) { pack_block_of_rows(a, packed, static_cast<int64_t>(index)); });
  const TileShares by(out_blocks, packed.row_blocks, workers.count(), a.weight_dtype != DType::bf16);
  workers.for_each(static_cast<size_t>(by.groups * by.shares), [&](size_t index, int worker) {
    const int64_t share = static_cast<int64_t>(index) % by.shares;
    const int64_t block = static_cast<int64_t>(index) / by.shares * by.task_blocks;
    const TileTask task = {block * kBlock, smaller(by.task_blocks, out_blocks - block), packed.row_blocks * share / by.shares,
                           packed.row_blocks * (share + 1) / by.shares};
    with_float_type(a.weight_dtype, [&](auto element) {
      using W = decltype(element);
      multiply_task<W>(a, packed, task,
                       workers.scratch(worker, task_bytes(task.end - task.row_block, task.out_blocks, kParts<W>)));
    });
  });
}

void multiply_on_tiles(const LinearArguments& a, Workers& workers) {
  const int64_t row_bytes = a.in_features * kMostParts * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t rows = smaller(kPassRows, kPackedRowsBytes / row_bytes + 1);
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
