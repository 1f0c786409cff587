// The product for many rows on tile registers, which multiply bf16 numbers 16 outputs x 32 features x 16 rows at a time.
// Weights are the left factor, which holds them as they lie: those in bf16 are copied. All other numbers are scaled and
// split into bf16 parts, so that the result is that of f32 arithmetic.
//
// A block is two tiles: 32 output features, or 32 rows, of 32 input features. The input is packed once. A task takes
// some blocks of outputs and of rows, and goes over the input features in chunks. It keeps the sums in L2 meanwhile.
#pragma once

#include <sched.h>

#include "kernels/linear/linear-rows.cpu.h"
#include "shared/cpu/tile-packing.cpu.h"
#include "shared/cpu/tile-products.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// The most blocks of outputs of a task, and of input features of a chunk: their weights, and the sums of all rows, leave
// room in L2.
constexpr int64_t kMostTaskBlocks = 8;
constexpr int64_t kChunkBlocks = 16;
constexpr int64_t kPassRows = 1024;
constexpr int64_t kPackedRowsBytes = 64 << 20;

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
  for (int64_t i = 0; i < kBlock; ++i) {
    Vec lines[kParts<T>] = {};
    if (i < rows) split_row(row + i * stride, features, scales[i], lines);
    for (int p = 0; p < kParts<T>; ++p) std::memcpy(block + p * kBlockNumbers + i * kBlock, &lines[p], sizeof lines[p]);
  }
}

// The rows of one pass, packed: blocks [row block, feature block, part, pair of features, row, 2], and the scale of each row.
// A tile's width of rows is packed at a time, and where there are fewer of these than workers, a share of its features.
struct PackedRows {
  int64_t first, tokens, row_blocks, depth_blocks, feature_shares;
  int parts;
  uint16_t* blocks;
  int32_t* scales;
  int32_t* done;  // of each block of rows: how many of its pieces are packed

  uint16_t* block(int64_t row_block, int64_t depth_block) const {
    return blocks + (row_block * depth_blocks + depth_block) * parts * kBlockNumbers;
  }
  int64_t pieces() const { return 2 * row_blocks * feature_shares; }
  void finish_piece(int64_t row_block) const { __atomic_fetch_add(&done[row_block], 1, __ATOMIC_RELEASE); }

  // Pieces are packed in front of all tasks, so workers are at them.
  void wait(int64_t row_block) const {
    constexpr int kSpins = 1000;
    for (int spin = 0; __atomic_load_n(&done[row_block], __ATOMIC_ACQUIRE) < 2 * feature_shares; ++spin) {
      spin < kSpins ? __builtin_ia32_pause() : static_cast<void>(sched_yield());
    }
  }
};

inline void pack_piece(const LinearArguments& a, const PackedRows& packed, int64_t piece) {
  const int64_t tile = piece / packed.feature_shares, share = piece % packed.feature_shares, begin = tile * kTile;
  const int64_t rows = begin < packed.tokens ? smaller(kTile, packed.tokens - begin) : 0;
  with_float_type(a.dtype, [&](auto element) {
    using T = decltype(element);
    const T* input = static_cast<const T*>(a.input) + (packed.first + begin) * a.input_stride;
    int32_t scales[kTile] = {};
    find_scales(input, a.input_stride, rows, a.in_features, scales);
    if (share == 0) std::memcpy(packed.scales + begin, scales, sizeof scales);
    const int64_t end = packed.depth_blocks * (share + 1) / packed.feature_shares;
    for (int64_t d = packed.depth_blocks * share / packed.feature_shares; d < end; ++d) {
      split_turned_tile(input + d * kBlock, a.input_stride, rows, a.in_features - d * kBlock, scales,
                        packed.block(tile / 2, d) + tile % 2 * kTileNumbers);
    }
  });
  packed.finish_piece(tile / 2);
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

inline bool need_scale(const Bfloat* row, int64_t stride, int64_t rows, int64_t features) {
  NumbersSeen seen;
  for (int64_t i = 0; i < rows; ++i, row += stride) {
    for (int64_t k = 0; k < features; k += kBlock) {
      Numbers bits = {};
      std::memcpy(&bits, row + k, sizeof *row * static_cast<size_t>(smaller(kBlock, features - k)));
      seen.add(bits);
    }
  }
  return seen.any_far();
}

// to[row, feature] of a block of bf16 rows; zeros from row `rows` and feature `features` on.
inline void copy_block(const Bfloat* row, int64_t stride, int64_t rows, int64_t features, uint16_t* to, NumbersSeen& seen) {
  for (int64_t i = 0; i < kBlock; ++i, to += kBlock) {
    Numbers bits = {};
    if (i < rows && features >= kBlock) {
      std::memcpy(&bits, row + i * stride, sizeof bits);
    } else if (i < rows) {
      std::memcpy(&bits, row + i * stride, static_cast<size_t>(features) * sizeof *row);
    }
    std::memcpy(to, &bits, sizeof bits);
    seen.add(bits);
  }
}

// The weights of a task. Those in bf16 are taken for numbers that need no scale until one turns up that does.
template <class W>
struct TaskWeights {
  const W* first;
  int64_t stride, outs, features, blocks;
  bool copied[kMostTaskBlocks];
  int32_t scales[kMostTaskBlocks * kBlock];

  TaskWeights(const LinearArguments& a, const TileTask& task)
      : first(static_cast<const W*>(a.weight) + task.out * a.weight_stride),
        stride(a.weight_stride),
        outs(a.out_features - task.out),
        features(a.in_features),
        blocks(task.out_blocks),
        scales() {
    for (int64_t b = 0; b < blocks; ++b) {
      copied[b] = kParts<W> == 1;
      if (!copied[b]) scale(b);
    }
  }

  const W* row(int64_t b) const { return first + b * kBlock * stride; }
  int64_t rows(int64_t b) const { return smaller(kBlock, outs - b * kBlock); }
  void scale(int64_t b) { find_scales(row(b), stride, rows(b), features, scales + b * kBlock); }

  // Finds the blocks that must be scaled.
  void scale_blocks() {
    if constexpr (kParts<W> == 1) {
      for (int64_t b = 0; b < blocks; ++b) {
        copied[b] = !need_scale(row(b), stride, rows(b), features);
        if (!copied[b]) scale(b);
      }
    }
  }

  // Blocks [feature block, part, out, feature] of block `b` of outputs, from `feature` on. False if a number must be scaled
  // and was not.
  bool pack(int64_t b, int64_t feature, int64_t depth, uint16_t* to) const {
    NumbersSeen seen;
    for (int64_t d = 0; d < depth; ++d, feature += kBlock, to += kParts<W> * kBlockNumbers) {
      if constexpr (kParts<W> == 1) {
        if (copied[b]) {
          copy_block(row(b) + feature, stride, rows(b), features - feature, to, seen);
          continue;
        }
      }
      split_block(row(b) + feature, stride, rows(b), features - feature, scales + b * kBlock, to);
    }
    return !seen.any_far();
  }

  bool pack_all(int64_t feature, int64_t depth, uint16_t* to) const {
    bool packed = true;
    for (int64_t b = 0; b < blocks; ++b) packed &= pack(b, feature, depth, to + b * depth * kParts<W> * kBlockNumbers);
    return packed;
  }
};

// What a task asks for while it multiplies its blocks of outputs and rows `b` and `r` over `depth` blocks of features from `k` on:
// a part of the input that it multiplies next, and a part of the weights that it packs next.
template <class W>
inline Ahead ahead_of(const PackedRows& packed, const TileTask& task, const TaskWeights<W>& weights, int64_t b, int64_t r,
                      int64_t k, int64_t depth) {
  constexpr int64_t kLineNumbers = 64 / sizeof(uint16_t);
  const int64_t row_blocks = task.end - task.row_block, next = k + depth;
  const bool last_rows = r + 1 == row_blocks, last_features = next >= packed.depth_blocks;
  Ahead ahead;
  if (!last_rows || !last_features) {
    const uint16_t* input = last_rows ? packed.block(task.row_block, next) : packed.block(task.row_block + r + 1, k);
    ahead.count = packed.parts * kBlockNumbers / kLineNumbers / task.out_blocks;
    ahead.lines = reinterpret_cast<const char*>(input + b * depth * ahead.count * kLineNumbers);
  }
  const int64_t first = kBlock * r / row_blocks, end = kBlock * (r + 1) / row_blocks;
  if (!last_features && end <= weights.rows(b)) {
    ahead.row = reinterpret_cast<const char*>(weights.row(b) + first * weights.stride + next * kBlock);
    ahead.row_bytes = weights.stride * static_cast<int64_t>(sizeof(W));
    ahead.rows = end - first;
  }
  return ahead;
}

template <class W>
inline void multiply_task(const LinearArguments& a, const PackedRows& packed, const TileTask& task, void* memory) {
  const int64_t row_blocks = task.end - task.row_block;
  float* sums = static_cast<float*>(memory);
  uint16_t* chunk = reinterpret_cast<uint16_t*>(sums + row_blocks * task.out_blocks * kBlockSums);
  TaskWeights<W> weights(a, task);

  TileRegisters tiles;
  for (int64_t k = 0; k < packed.depth_blocks;) {
    const int64_t depth = smaller(kChunkBlocks, packed.depth_blocks - k);
    const int64_t chunk_numbers = depth * kParts<W> * kBlockNumbers;
    if (!weights.pack_all(k * kBlock, depth, chunk)) {
      weights.scale_blocks();
      k = 0;
      continue;
    }
    for (int64_t r = 0; r < row_blocks; ++r) {
      if (k == 0) packed.wait(task.row_block + r);
      const uint16_t* input = packed.block(task.row_block + r, k);
      for (int64_t b = 0; b < task.out_blocks; ++b) {
        const auto multiply = k == 0 ? multiply_blocks<false, kParts<W>> : multiply_blocks<true, kParts<W>>;
        multiply(tiles, chunk + b * chunk_numbers, input, packed.parts, depth, ahead_of(packed, task, weights, b, r, k, depth),
                 sums + (r * task.out_blocks + b) * kBlockSums);
      }
    }
    k += depth;
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

// How outputs and rows of a layer are shared out: blocks of outputs of a task, and shares of the rows.
struct TileShares {
  int64_t task_blocks = 1, groups = 0, shares = 1;

  // The layer's part of the call's tasks, or more; of those ways, the one that reads and packs least for each product.
  TileShares(const LinearArguments& a, int64_t all_outs, int64_t row_blocks, int64_t tasks) {
    if (a.out_features == 0) return;
    const int64_t out_blocks = divide_up(a.out_features, kBlock), wanted = divide_up(tasks * a.out_features, all_outs);
    const bool splits = a.weight_dtype != DType::bf16;
    int64_t least = 0;
    for (int64_t blocks = kMostTaskBlocks; blocks > 0; blocks /= 2) {
      const int64_t of_outs = divide_up(out_blocks, blocks);
      const int64_t of_rows = smaller(divide_up(wanted, of_outs), row_blocks);
      // An input number is three parts, a weight one. To copy a weight costs about as much as to read two, to split it eight.
      const int64_t cost = 3 * out_blocks * row_blocks / blocks + (splits ? 9 : 3) * out_blocks * of_rows;
      if (least != 0 && cost >= least) continue;
      least = cost;
      task_blocks = blocks;
      groups = of_outs;
      shares = of_rows;
    }
  }

  int64_t count() const { return groups * shares; }
};

// The tasks of all layers of a call, one behind the other. The outputs of the last of them are cut in halves, so that workers
// end at about the same time.
class TileTasks {
 public:
  TileTasks(const LayersOfInput& layers, int64_t row_blocks, int workers)
      : layers_(layers), row_blocks_(row_blocks), workers_(workers) {
    for (const LinearArguments& a : layers) outs_ += a.out_features;
    for (const LinearArguments& a : layers) whole_ += shares_of(a).count();
    cut_ = workers == 1 ? 0 : smaller(whole_, workers);
    whole_ -= cut_;
  }

  int64_t count() const { return whole_ + 2 * cut_; }

  // Calls body(layer, task) with that of an index, unless it is the half of a task that has no two blocks.
  template <class Body>
  void run(int64_t index, Body&& body) const {
    const bool is_whole = index < whole_;
    const int64_t half = (index - whole_) % 2;
    if (!is_whole) index = whole_ + (index - whole_) / 2;
    const LinearArguments* a = layers_.begin();
    for (; index >= shares_of(*a).count(); ++a) index -= shares_of(*a).count();
    const TileShares by = shares_of(*a);
    const int64_t share = index % by.shares, block = index / by.shares * by.task_blocks;
    const int64_t blocks = smaller(by.task_blocks, divide_up(a->out_features, kBlock) - block);
    const int64_t begin = is_whole ? 0 : blocks * half / 2, end = is_whole ? blocks : blocks * (half + 1) / 2;
    if (begin == end) return;
    body(*a, TileTask{(block + begin) * kBlock, end - begin, row_blocks_ * share / by.shares, row_blocks_ * (share + 1) / by.shares});
  }

 private:
  static constexpr int64_t kWorkerTasks = 2;

  TileShares shares_of(const LinearArguments& a) const {
    return TileShares(a, outs_, row_blocks_, kWorkerTasks * workers_);
  }

  const LayersOfInput& layers_;
  int64_t row_blocks_, workers_, outs_ = 0, cut_ = 0, whole_ = 0;
};

inline void multiply_pass(const LayersOfInput& layers, Workers& workers, int64_t first, int64_t tokens) {
  const LinearArguments& input = *layers.first;
  PackedRows packed = {};
  packed.first = first;
  packed.tokens = tokens;
  packed.row_blocks = divide_up(tokens, kBlock);
  packed.depth_blocks = divide_up(input.in_features, kBlock);
  packed.feature_shares = smaller(divide_up(workers.count(), 2 * packed.row_blocks), packed.depth_blocks);
  with_float_type(input.dtype, [&](auto element) { packed.parts = kParts<decltype(element)>; });
  const size_t numbers = static_cast<size_t>(packed.row_blocks * packed.depth_blocks * packed.parts * kBlockNumbers);
  const size_t blocks = static_cast<size_t>(packed.row_blocks), pieces = static_cast<size_t>(packed.pieces());
  packed.blocks = static_cast<uint16_t*>(
      workers.shared_ring(numbers * sizeof(uint16_t) + blocks * (kBlock + 1) * sizeof(int32_t)));
  packed.scales = reinterpret_cast<int32_t*>(packed.blocks + numbers);
  packed.done = packed.scales + blocks * kBlock;
  for (size_t i = 0; i < blocks; ++i) packed.done[i] = 0;
  const TileTasks tasks(layers, packed.row_blocks, workers.count());
  workers.for_each(pieces + static_cast<size_t>(tasks.count()), [&](size_t index, int worker) {
    if (index < pieces) return pack_piece(input, packed, static_cast<int64_t>(index));
    tasks.run(static_cast<int64_t>(index - pieces), [&](const LinearArguments& a, const TileTask& task) {
      with_float_type(a.weight_dtype, [&](auto element) {
        using W = decltype(element);
        multiply_task<W>(a, packed, task,
                         workers.scratch(worker, task_bytes(task.end - task.row_block, task.out_blocks, kParts<W>)));
      });
    });
  });
}

void multiply_on_tiles(const LayersOfInput& layers, Workers& workers) {
  const LinearArguments& input = *layers.first;
  const int64_t row_bytes = input.in_features * kMostParts * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t rows = smaller(kPassRows, kPackedRowsBytes / row_bytes + 1);
  const int64_t passes = divide_up(input.tokens, rows);
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t first = input.tokens * pass / passes;
    const int64_t tokens = input.tokens * (pass + 1) / passes - first;
    if (tokens > 0) multiply_pass(layers, workers, first, tokens);
  }
}

}  // namespace
}  // namespace KV_ISA
}  // namespace kv
