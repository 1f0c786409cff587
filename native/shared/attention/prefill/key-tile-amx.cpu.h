// Multiplies one panel of query rows by one tile of keys on tile registers, for a cache in bf16.
//
// Keys are the left factor as they lie, values turned: rows are dims. Queries and weights are the right one, as sums of
// three bf16 parts, so that the products are those of f32 arithmetic. Tiles take small numbers for zero, and their
// products can overflow. So keys and values that are far from the middle of f32's range, infinite or NaN are zeros in the
// tile, and are multiplied apart, in vector registers; and so are rows of queries with such a number.
#pragma once

#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/panel.cpu.h"
#include "shared/cpu/tile-packing.cpu.h"

namespace kv {
namespace KV_ISA {

constexpr int64_t kPartsNumbers = kMostParts * kBlockNumbers;
static_assert(kPanelRows == kBlock, "a panel is as wide as a block");
constexpr int kTileKeyBlocks = kTileKeys / kBlock;

// Number `i` of each row of a panel's vector `v`, from its parts [block of numbers, part, pair of numbers, row, 2].
inline Vec whole(const uint16_t* parts, int i, int v) {
  parts += i / kBlock * kPartsNumbers + v * kTileNumbers + i % kBlock / 2 * kBlock;
  Vec part[kMostParts];
  for (Vec& p : part) {
    VecInt pairs;
    std::memcpy(&pairs, parts, sizeof pairs);
    p = reinterpret_cast<Vec>(i % 2 == 0 ? pairs << 16 : pairs & static_cast<int32_t>(0xffff0000u));
    parts += kBlockNumbers;
  }
  return part[0] + (part[1] + part[2]);
}

inline int row_stride(int dim) { return dim; }

// What a panel keeps of its queries: their parts, [row, dim] in f32, and which rows are multiplied apart.
struct Queries {
  uint16_t* parts;
  float* rows;
  int32_t* apart;

  static int64_t floats(int dim) { return dim / kBlock * kPartsNumbers / 2 + (dim + 1) * kPanelRows; }

  Queries(const Panel& panel, int dim)
      : parts(reinterpret_cast<uint16_t*>(panel.query)),
        rows(panel.query + dim / kBlock * kPartsNumbers / 2),
        apart(reinterpret_cast<int32_t*>(rows + dim * kPanelRows)) {}

  bool any_apart() const {
    int32_t any = 0;
    for (int row = 0; row < kPanelRows; ++row) any |= apart[row];
    return any != 0;
  }

  // Makes zeros of the parts of rows that are multiplied apart.
  __attribute__((noinline)) void clear_apart(int dim) const {
    for (int row = 0; row < kPanelRows; ++row) {
      if (!apart[row]) continue;
      uint16_t* pair = parts + row / kTile * kTileNumbers + row % kTile * 2;
      for (int part = 0; part < dim / kBlock * kMostParts; ++part) {
        for (int i = 0; i < kTile; ++i) pair[part * kBlockNumbers + i * kBlock] = pair[part * kBlockNumbers + i * kBlock + 1] = 0;
      }
    }
  }
};

inline int64_t query_floats(int dim) { return Queries::floats(dim); }

// Reads the queries of `rows` rows, and how many keys they see.
template <class T>
inline void read_rows(const PagedAttentionArguments& a, const RowRange& range, int64_t first_row, int64_t rows,
                      int dim, Panel& panel) {
  constexpr float kMost = 0x1p40f;
  const Queries to(panel, dim);
  std::memset(to.rows, 0, sizeof(float) * static_cast<size_t>((dim + 1) * kPanelRows));
  for (int64_t row = 0; row < rows; ++row) {
    const T* query = range.query<T>(a, first_row + row);
    panel.visible[row] = range.visible(first_row + row);
    for (int d = 0; d < dim; ++d) {
      const float number = to_float(query[d]) * a.scale;
      to.rows[row * dim + d] = number;
      to.apart[row] |= !(__builtin_fabsf(number) <= kMost);
    }
  }
  for (int first = 0; first < kPanelRows; first += kTile) {
    for (int d = 0; d < dim; d += kBlock) {
      constexpr int32_t kNoScales[kTile] = {};
      split_turned_tile(to.rows + first * dim + d, dim, kTile, kBlock, kNoScales,
                        to.parts + d / kBlock * kPartsNumbers + first / kTile * kTileNumbers);
    }
  }
  if (to.any_apart()) to.clear_apart(dim);
}

// sums[block of rows] (+)= left . right: blocks [block of rows, left_depth, row, number] of the left factor, of which the
// first `depth` of each row count, and [block, part, pair, column, 2] of the right one.
struct BlockProduct {
  const uint16_t* left;
  const uint16_t* right;
  float* sums;
  int rows, left_depth, depth;
  bool accumulate;
};

// At most two products, which are multiplied part by part: four products of tiles at a time.
class BlockProducts {
 public:
  void push(const BlockProduct& product) {
    products_[count_++] = product;
    parts_ += product.rows * product.depth * kMostParts;
  }

  // How many wait.
  int parts() const { return parts_; }

  __attribute__((always_inline)) void multiply_part() {
    const BlockProduct& p = products_[current_];
    float* sums = p.sums + row_ * kBlockSums;
    if (block_ == 0 && part_ == 0) {
      if (p.accumulate) {
        tiles_.load<0>(sums);
        tiles_.load<1>(sums + kTileSums);
        tiles_.load<2>(sums + 2 * kTileSums);
        tiles_.load<3>(sums + 3 * kTileSums);
      } else {
        tiles_.clear<0>();
        tiles_.clear<1>();
        tiles_.clear<2>();
        tiles_.clear<3>();
      }
    }
    if (part_ == 0) {
      const uint16_t* left = p.left + (row_ * p.left_depth + block_) * kBlockNumbers;
      tiles_.load<4>(left);
      tiles_.load<5>(left + kTileNumbers);
    }
    const uint16_t* right = p.right + (block_ * kMostParts + part_) * kBlockNumbers;
    tiles_.load<6>(right);
    tiles_.load<7>(right + kTileNumbers);
    tiles_.multiply<0, 4, 6>();
    tiles_.multiply<1, 4, 7>();
    tiles_.multiply<2, 5, 6>();
    tiles_.multiply<3, 5, 7>();
    --parts_;
    if (++part_ < kMostParts) return;
    part_ = 0;
    if (++block_ < p.depth) return;
    block_ = 0;
    tiles_.store<0>(sums);
    tiles_.store<1>(sums + kTileSums);
    tiles_.store<2>(sums + 2 * kTileSums);
    tiles_.store<3>(sums + 3 * kTileSums);
    if (++row_ < p.rows) return;
    row_ = 0;
    if (++current_ == count_) current_ = count_ = 0;
  }

  void finish() {
    while (parts_ > 0) multiply_part();
  }

 private:
  TileRegisters tiles_;
  BlockProduct products_[2];
  int count_ = 0, current_ = 0, row_ = 0, block_ = 0, part_ = 0, parts_ = 0;
};

// A number of a tile that is far from the middle of the range.
struct FarNumber {
  int16_t row, column;
  float value;
};

// A left factor of the products: blocks [block of rows, block of columns, row, column]. Rows are keys and columns dims, or
// rows are dims of the values and columns keys. A line, which begins at a multiple of 32 columns, is written at a time.
class PackedTile {
 public:
  static int64_t floats(int dim) { return (kTileKeys / 2 + 2 * kTileKeys) * int64_t{dim}; }

  PackedTile(int rows, int columns, float* memory)
      : rows_(rows),
        columns_(columns),
        blocks_(reinterpret_cast<uint16_t*>(memory)),
        far_(reinterpret_cast<FarNumber*>(memory + rows * columns / 2)) {}

  void write(int row, int column, Numbers line) {
    std::memcpy(number(row, column), &line, sizeof line);
    seen_.add(line);
  }

  // Behind the last line: moves far numbers into a list, in the order of rows, and leaves zeros in their places.
  void finish() {
    if (seen_.any_far()) find_far();
  }

  // sums[row, row of the panel] (+)= sum of the numbers in the first `columns` columns of the first `rows` rows, times
  // `right`; whole blocks of both.
  BlockProduct product(int rows, int columns, const uint16_t* right, bool accumulate, float* sums) const {
    return {blocks_, right, sums, static_cast<int>(divide_up(rows, kBlock)), columns_ / kBlock,
            static_cast<int>(divide_up(columns, kBlock)), accumulate};
  }

  int rows() const { return rows_; }
  int columns() const { return columns_; }
  float at(int row, int column) const { return bfloat_to_float(*number(row, column)); }
  const FarNumber* begin_far() const { return far_; }
  const FarNumber* end_far() const { return far_ + far_count_; }

 private:
  __attribute__((noinline)) void find_far() {
    for (int row = 0; row < rows_; ++row) {
      for (int column = 0; column < columns_; ++column) {
        uint16_t* bits = number(row, column);
        if (!is_far(*bits)) continue;
        far_[far_count_++] = {static_cast<int16_t>(row), static_cast<int16_t>(column), bfloat_to_float(*bits)};
        *bits = 0;
      }
    }
  }

  uint16_t* number(int row, int column) const {
    return blocks_ + (row / kBlock * (columns_ / kBlock) + column / kBlock) * kBlockNumbers + row % kBlock * kBlock + column % kBlock;
  }

  int rows_, columns_, far_count_ = 0;
  uint16_t* blocks_;
  FarNumber* far_;
  NumbersSeen seen_;
};

// The keys row_of(0) .. row_of(count - 1).
template <class RowOf>
inline PackedTile pack_keys(int dim, int count, float* memory, RowOf&& row_of) {
  PackedTile tile(kTileKeys, dim, memory);
  for (int key = 0; key < count; ++key) {
    const Bfloat* row = row_of(key);
    for (int d = 0; d < dim; d += kBlock) {
      Numbers line;
      std::memcpy(&line, row + d, sizeof line);
      tile.write(key, d, line);
    }
  }
  tile.finish();
  return tile;
}

// The values row_of(0) .. row_of(count - 1), and zeros up to the end of a block.
template <class RowOf>
inline PackedTile pack_values(int dim, int count, float* memory, RowOf&& row_of) {
  PackedTile tile(dim, kTileKeys, memory);
  for (int first = 0; first < count; first += kBlock) {
    const Bfloat* rows[kBlock];
    for (int i = 0; i < kBlock; ++i) rows[i] = first + i < count ? row_of(first + i) : nullptr;
    for (int d = 0; d < dim; d += kTile) {
      const auto numbers = [&](int i) { return rows[i] == nullptr ? VecInt{} : load_bits(rows[i] + d); };
      Vec lines[kTile];
      for (int i = 0; i < kTile; ++i) lines[i] = reinterpret_cast<Vec>(numbers(2 * i) | numbers(2 * i + 1) << 16);
      transpose(lines);
      for (int i = 0; i < kTile; ++i) tile.write(d + i, first, reinterpret_cast<Numbers>(lines[i]));
    }
  }
  tile.finish();
  return tile;
}

// Multiplies panels by tiles. While vector registers compute a panel's weights, tile registers multiply the values by the
// weights of the panel before it, and the keys by the queries of the next.
class PanelProducts {
 public:
  static constexpr int64_t kScoreFloats = kTileKeys * kPanelRows, kWeightFloats = kTileKeyBlocks * kPartsNumbers / 2;
  static constexpr int64_t kFloats = 2 * (kScoreFloats + kWeightFloats);

  explicit PanelProducts(float* memory) : memory_(memory) {}

  // `count` keys from `first_key` on.
  void attend(Panel* panels, int64_t panel_count, int32_t first_key, int32_t count, const PackedTile& keys, const PackedTile& values) {
    const auto count_of = [&](int64_t p) { return reachable(panels[p], first_key, count); };
    int64_t p = 0;
    while (p < panel_count && count_of(p) == 0) ++p;
    if (p == panel_count) return;
    push_scores(panels[p], count_of(p), keys, scores_of(p));
    products_.finish();
    for (int64_t last = -1; p < panel_count; last = p++) {
      if (p + 1 < panel_count) push_scores(panels[p + 1], count_of(p + 1), keys, scores_of(p + 1));
      add_far_scores(panels[p], count_of(p), keys, scores_of(p));
      if (first_key + count_of(p) > panels[p].fewest_visible) mask(panels[p], first_key, count_of(p), scores_of(p));
      Vec peak[kPanelVectors], rescale[kPanelVectors];
      raise_maxima(panels[p], count_of(p), scores_of(p), peak, rescale);
      rescale_output(panels[p], values.rows(), rescale);
      weigh(panels[p], count_of(p), peak, rescale, scores_of(p), weights_of(p));
      products_.finish();
      if (last >= 0) add_far_values(panels[last], first_key, count_of(last), values, weights_of(last));
      products_.push(values.product(values.rows(), count_of(p), weights_of(p), true, panels[p].output));
    }
    products_.finish();
    const int64_t last = panel_count - 1;
    add_far_values(panels[last], first_key, count_of(last), values, weights_of(last));
  }

 private:
  float* scores_of(int64_t p) { return memory_ + p % 2 * kScoreFloats; }
  uint16_t* weights_of(int64_t p) { return reinterpret_cast<uint16_t*>(memory_ + 2 * kScoreFloats + p % 2 * kWeightFloats); }

  void push_scores(const Panel& panel, int count, const PackedTile& keys, float* scores) {
    products_.push(keys.product(count, keys.columns(), Queries(panel, keys.columns()).parts, false, scores));
  }

  static void rescale_output(Panel& panel, int dim, const Vec* rescale) {
    float factors[kPanelRows];
    for (int v = 0; v < kPanelVectors; ++v) store(factors + v * kLanes, rescale[v]);
    bool ones = true;
    for (const float factor : factors) ones &= factor == 1.0f;
    if (ones) return;
    for (int d = 0; d < dim; ++d) {
      for (int v = 0; v < kPanelVectors; ++v) {
        float* output = panel.output + place(d, v);
        store(output, load(output) * rescale[v]);
      }
    }
  }

  // The scores of rows that are zeros among the parts, and what far numbers of the keys add to all.
  __attribute__((noinline)) static void add_far_scores(const Panel& panel, int count, const PackedTile& keys, float* scores) {
    const int dim = keys.columns();
    const Queries queries(panel, dim);
    const auto score = [&](int key, int row) -> float& { return scores[place(key, row / kLanes) + row % kLanes]; };
    if (queries.any_apart()) {
      for (int row = 0; row < kPanelRows; ++row) {
        if (!queries.apart[row]) continue;
        for (int key = 0; key < count; ++key) {
          float sum = 0;
          for (int d = 0; d < dim; ++d) sum += queries.rows[row * dim + d] * keys.at(key, d);
          score(key, row) = sum;
        }
      }
    }
    for (const FarNumber* n = keys.begin_far(); n < keys.end_far() && n->row < count; ++n) {
      for (int row = 0; row < kPanelRows; ++row) score(n->row, row) += n->value * queries.rows[row * dim + n->column];
    }
  }

  // What far numbers of the values add for the rows that see them.
  __attribute__((noinline)) static void add_far_values(Panel& panel, int32_t first_key, int count, const PackedTile& values, const uint16_t* weights) {
    for (const FarNumber* n = values.begin_far(); n < values.end_far(); ++n) {
      if (n->column >= count) continue;
      for (int v = 0; v < kPanelVectors; ++v) {
        VecInt visible;
        std::memcpy(&visible, panel.visible + v * kLanes, sizeof visible);
        float* output = panel.output + place(n->row, v);
        const Vec before = load(output);
        store(output, visible > first_key + n->column ? before + n->value * whole(weights, n->column, v) : before);
      }
    }
  }

  // Splits exp(score - maximum), and zeros up to the end of a block, and updates the sums. Multiplies what waits meanwhile.
  void weigh(Panel& panel, int count, const Vec* peak, const Vec* rescale, float* scores, uint16_t* weights) {
    const int end = static_cast<int>(divide_up(count, kBlock)) * kBlock;
    for (int key = count; key < end; ++key) {
      for (int v = 0; v < kPanelVectors; ++v) store(scores + place(key, v), splat(-__builtin_inff()));
    }
    Vec sum[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) sum[v] = load(panel.sum + v * kLanes) * rescale[v];
    const int parts = products_.parts();
    int due = 0;
    for (int key = 0; key < end; key += 2) {
      for (due += 2 * parts; due >= end; due -= end) products_.multiply_part();
      uint16_t* pair = weights + key / kBlock * kPartsNumbers + key % kBlock / 2 * kBlock;
#pragma GCC unroll 8
      for (int v = 0; v < kPanelVectors; ++v) {
        Vec even = exponential(load(scores + place(key, v)) - peak[v]);
        Vec odd = exponential(load(scores + place(key + 1, v)) - peak[v]);
        sum[v] += even;
        sum[v] += odd;
#pragma GCC unroll 8
        for (int p = 0; p < kMostParts; ++p) {
          const VecInt upper = upper_halves(even, odd);
          std::memcpy(pair + p * kBlockNumbers + v * kTileNumbers, &upper, sizeof upper);
          even -= upper_half(even);
          odd -= upper_half(odd);
        }
      }
    }
    for (int v = 0; v < kPanelVectors; ++v) store(panel.sum + v * kLanes, sum[v]);
  }

  // Cut off, not rounded: what three parts of 8 bits leave of f32 is zero.
  static Vec upper_half(Vec x) {
    return reinterpret_cast<Vec>(reinterpret_cast<VecInt>(x) & static_cast<int32_t>(0xffff0000u));
  }

  BlockProducts products_;
  float* memory_;
};

}  // namespace KV_ISA
}  // namespace kv
