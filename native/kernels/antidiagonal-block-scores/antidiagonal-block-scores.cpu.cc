#include "kernels/antidiagonal-block-scores/antidiagonal-block-scores.h"

#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/key-tile.cpu.h"
#include "shared/prefill-block-scores/scored-tile.h"

namespace kv {
namespace KV_ISA {
namespace {

// Strided rows of a task: whole panels, and whole tiles with either stride.
constexpr int32_t kBandRows = 48;
constexpr int32_t kPanels = kBandRows / kPanelRows;
static_assert(kBandRows % kPanelRows == 0 && kBandRows % (kScoredTileRows / 8) == 0, "a band has whole panels and tiles");
// Keys that are multiplied together: two blocks, so that even with stride 16 they fill a step of the micro-kernel.
constexpr int32_t kRunKeys = 2 * kScoredBlockKeys;

// Sums of exponentials, sum * e^peak, of the strided rows of a band.
struct LogSums {
  float* peaks;
  float* sums;
};

// Some tiles of one query head.
struct Band {
  const AntidiagonalBlockScoresArguments& a;
  ScoredTile first;  // the first tile
  int32_t first_tile;
  int32_t rows;      // of the entry, from the band's first on

  Band(const AntidiagonalBlockScoresArguments& arguments, int64_t query_head, int32_t tile)
      : a(arguments), first(a, query_head, tile), first_tile(tile), rows(first.tokens - first.position) {}

  static constexpr int32_t tiles(int32_t stride) { return kBandRows * stride / kScoredTileRows; }

  int32_t strided_rows() const {
    const int32_t all = static_cast<int32_t>(divide_up(rows, a.stride));
    return all < kBandRows ? all : kBandRows;
  }
  // How many strided keys the strided row sees.
  int32_t visible(int32_t row) const { return (first.position + row * a.stride) / a.stride + 1; }
  int32_t visible_blocks() const {
    return static_cast<int32_t>(divide_up(visible(strided_rows() - 1), kScoredBlockKeys / a.stride));
  }

  // Panels of scaled queries, [S * dim, row]: strided row R is its S queries, the last one first.
  template <class T>
  void load_queries(float* to) const {
    const float factor = a.scale / static_cast<float>(a.stride);
    for (int32_t row = 0; row < kBandRows; ++row) {
      float* panel = to + row / kPanelRows * kPanelRows * a.stride * a.head_dim + row % kPanelRows;
      for (int32_t i = 0; i < a.stride; ++i) {
        const int32_t own = row * a.stride + a.stride - 1 - i;
        const T* query = own < rows ? query_at<T>(a, first.first_row + own, first.query_head) : nullptr;
        for (int32_t d = 0; d < a.head_dim; ++d) {
          panel[(i * a.head_dim + d) * kPanelRows] = query == nullptr ? 0 : to_float(query[d]) * factor;
        }
      }
    }
  }

  template <class T>
  void load_keys(int32_t first_key, float* to) const {
    for (int32_t key = first_key; key < first_key + kRunKeys; ++key, to += a.head_dim) {
      if (key < first.tokens) {
        load_row(key_at<T>(a, first.blocks, key), to, a.head_dim, a.head_dim);
      } else {
        std::memset(to, 0, static_cast<size_t>(a.head_dim) * sizeof(float));
      }
    }
  }

  // Adds up the exponentials of one vector of rows over the strided keys from `begin` to `end`. The products are those
  // of the strided keys from 0 on.
  void add_block(const float* products, int32_t begin, int32_t end, int32_t first_key, int32_t row, float* peak_to,
                 float* sum_to) const {
    VecInt seen;
    for (int lane = 0; lane < kLanes; ++lane) seen[lane] = visible(row + lane) - first_key;
    const auto logit = [&](int32_t key) {
      return seen > key ? load(products + key * kPanelRows) : splat(-__builtin_inff());
    };
    Vec peak = splat(kLowestScore);
    for (int32_t key = begin; key < end; ++key) peak = maximum(peak, logit(key));
    Vec sum = {};
    for (int32_t key = begin; key < end; ++key) sum += exponential(logit(key) - peak);
    store(peak_to, peak);
    store(sum_to, sum);
  }

  // Fills `of_blocks`, [block, row].
  template <class T>
  void sum_blocks(const float* queries, float* keys, float* products, LogSums of_blocks) const {
    const int32_t depth = a.stride * a.head_dim;
    const int32_t of_block = kScoredBlockKeys / a.stride;
    for (int32_t block = 0; block < visible_blocks(); block += 2) {
      load_keys<T>(block * kScoredBlockKeys, keys);
      for (int32_t panel = 0; panel < kPanels; ++panel) {
        const float* of_panel = queries + panel * kPanelRows * depth;
        for (int32_t key = 0; key < 2 * of_block; key += kStep) {
          multiply<false>(keys + key * depth, depth, 1, of_panel, depth, nullptr, products + key * kPanelRows);
        }
        for (int32_t half = 0; half < 2 && block + half < visible_blocks(); ++half) {
          for (int32_t v = 0; v < kPanelVectors; ++v) {
            const int32_t row = panel * kPanelRows + v * kLanes;
            const int64_t at = int64_t{block + half} * kBandRows + row;
            add_block(products + v * kLanes, half * of_block, (half + 1) * of_block, block * of_block, row,
                      of_blocks.peaks + at, of_blocks.sums + at);
          }
        }
      }
    }
  }

  // Turns the peaks into logarithms of shares, without those of the sums; the sums into shares of the rows' sums.
  void divide_by_rows(LogSums of_blocks) const {
    for (int32_t row = 0; row < kBandRows; row += kLanes) {
      Vec peak = splat(kLowestScore);
      Vec total = {};
      for (int32_t block = 0; block < visible_blocks(); ++block) {
        peak = maximum(peak, load(of_blocks.peaks + block * kBandRows + row));
      }
      for (int32_t block = 0; block < visible_blocks(); ++block) {
        const int32_t at = block * kBandRows + row;
        total += load(of_blocks.sums + at) * exponential(load(of_blocks.peaks + at) - peak);
      }
      for (int32_t block = 0; block < visible_blocks(); ++block) {
        const int32_t at = block * kBandRows + row;
        store(of_blocks.peaks + at, load(of_blocks.peaks + at) - peak);
        store(of_blocks.sums + at, load(of_blocks.sums + at) / total);
      }
    }
  }

  void write_scores(LogSums of_blocks) const {
    const int32_t of_tile = kScoredTileRows / a.stride;
    for (int32_t tile = 0; tile < tiles(a.stride) && tile * of_tile < strided_rows(); ++tile) {
      float* scores = first.scores + int64_t{tile} * a.blocks;
      const int32_t begin = tile * of_tile;
      const int32_t end = begin + of_tile < strided_rows() ? begin + of_tile : strided_rows();
      for (int32_t block = 0; block < a.blocks; ++block) {
        scores[block] = block < visible_blocks() ? mean_share(of_blocks, block, begin, end) : -__builtin_inff();
      }
    }
  }

 private:
  // The logarithm of the mean share of a block over some rows.
  static float mean_share(LogSums of_blocks, int32_t block, int32_t begin, int32_t end) {
    const float* peaks = of_blocks.peaks + block * kBandRows;
    const float* sums = of_blocks.sums + block * kBandRows;
    float peak = -__builtin_inff();
    for (int32_t row = begin; row < end; ++row) peak = peaks[row] > peak ? peaks[row] : peak;
    float sum = 0;
    for (int32_t row = begin; row < end; row += kLanes) {
      const int32_t count = end - row < kLanes ? end - row : kLanes;
      const Vec powers = exponential(load(peaks + row) - peak);
      for (int32_t lane = 0; lane < count; ++lane) sum += sums[row + lane] * powers[lane];
    }
    return peak + __builtin_logf(sum / static_cast<float>(end - begin));
  }
};

}  // namespace

void antidiagonal_block_scores(const AntidiagonalBlockScoresArguments& a, Workers& workers) {
  const int32_t tiles_of_band = Band::tiles(a.stride);
  const int64_t bands = divide_up(a.tiles, tiles_of_band);
  const int64_t queries = int64_t{kBandRows} * a.stride * a.head_dim;
  const int64_t keys = int64_t{kRunKeys} * a.head_dim;
  const int64_t products = int64_t{kRunKeys} / a.stride * kPanelRows;
  const int64_t of_blocks = int64_t{a.blocks} * kBandRows + kLanes;  // a vector may reach behind the last row
  const size_t bytes = static_cast<size_t>(queries + keys + products + 2 * of_blocks) * sizeof(float);
  workers.for_each(static_cast<size_t>(bands * a.query_heads), [&](size_t index, int worker) {
    // The last tiles see the most, so they come first.
    const int64_t band_index = bands - 1 - static_cast<int64_t>(index) / a.query_heads;
    const Band band(a, static_cast<int64_t>(index) % a.query_heads, static_cast<int32_t>(band_index) * tiles_of_band);
    auto* memory = static_cast<float*>(workers.scratch(worker, bytes));
    const LogSums sums = {memory + queries + keys + products, memory + queries + keys + products + of_blocks};
    with_float_type(a.query_dtype, [&](auto element) { band.load_queries<decltype(element)>(memory); });
    with_float_type(a.cache_dtype, [&](auto element) {
      band.sum_blocks<decltype(element)>(memory, memory + queries, memory + queries + keys, sums);
    });
    band.divide_by_rows(sums);
    band.write_scores(sums);
  });
}

}  // namespace KV_ISA
}  // namespace kv
