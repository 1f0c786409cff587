// The lanes of a vector are probed rows: a softmax needs no operation across lanes, and a key's weights are those of
// lags that follow each other.
#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores.h"

#include "kernels/vertical-slash-block-scores/vertical-slash-block-scores-lines.h"
#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/key-tile.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

constexpr int32_t kPanels = (kProbedRows + kPanelRows - 1) / kPanelRows;
constexpr int32_t kRows = kPanels * kPanelRows;
// A vector of rows beyond the last ones may reach behind the lags of a split.
constexpr int32_t kPaddedLags = kSplitLags + kRows;

// Sums of exponentials of each row, sum * e^peak.
struct RowSums {
  float peaks[kRows];
  float sums[kRows];
};

struct Scratch {
  float* queries;   // panels, [dim, row], scaled
  float* keys;      // [key, dim] of one block
  float* products;  // [key, row] of one block and panel

  static size_t floats(int32_t dim) { return static_cast<size_t>((kRows + kTileKeys) * dim + kTileKeys * kPanelRows); }
  Scratch(void* memory, int32_t dim)
      : queries(static_cast<float*>(memory)), keys(queries + kRows * dim), products(keys + kTileKeys * dim) {}
};

template <class T>
void load_queries(const PrefillBlockScoresArguments& a, const ProbedHead& head, float* to) {
  for (int32_t row = 0; row < kRows; ++row) {
    const T* query = row < head.probed ? query_at<T>(a, head.row(row), head.first.query_head) : nullptr;
    float* panel = to + row / kPanelRows * kPanelRows * a.head_dim + row % kPanelRows;
    for (int32_t d = 0; d < a.head_dim; ++d) panel[d * kPanelRows] = query == nullptr ? 0 : to_float(query[d]) * a.scale;
  }
}

template <class T>
void load_keys(const PrefillBlockScoresArguments& a, const ProbedHead& head, int32_t first_key, int32_t count, float* to) {
  for (int32_t i = 0; i < count; ++i) {
    load_row(key_at<T>(a, head.first.blocks, first_key + i), to + i * a.head_dim, a.head_dim, a.head_dim);
  }
  const int32_t rest = kTileKeys - count;
  std::memset(to + count * a.head_dim, 0, static_cast<size_t>(rest * a.head_dim) * sizeof(float));
}

// Calls body(key, row, logits of the rows from `row` on) for the keys of a split, one vector of rows at a time. Keys that
// a row does not see have logits of minus infinity.
template <class Body>
void for_each_logit(const PrefillBlockScoresArguments& a, const ProbedHead& head, int32_t split, const Scratch& scratch,
                    Body&& body) {
  const int32_t split_end = (split + 1) * kSplitKeys;
  const int32_t end = split_end < head.first.tokens ? split_end : head.first.tokens;
  for (int32_t first = split * kSplitKeys; first < end; first += kTileKeys) {
    const int32_t count = end - first < kTileKeys ? end - first : kTileKeys;
    with_float_type(a.cache_dtype, [&](auto element) { load_keys<decltype(element)>(a, head, first, count, scratch.keys); });
    for (int32_t panel = 0; panel < kPanels; ++panel) {
      const float* queries = scratch.queries + panel * kPanelRows * a.head_dim;
      for (int32_t key = 0; key < count; key += kStep) {
        multiply<false>(scratch.keys + key * a.head_dim, a.head_dim, 1, queries, a.head_dim, nullptr,
                        scratch.products + key * kPanelRows);
      }
      for (int32_t v = 0; v < kPanelVectors; ++v) {
        const int32_t row = panel * kPanelRows + v * kLanes;
        VecInt seen;
        for (int lane = 0; lane < kLanes; ++lane) seen[lane] = row + lane < head.probed ? head.position(row + lane) + 1 : 0;
        for (int32_t key = 0; key < count; ++key) {
          const Vec products = load(scratch.products + key * kPanelRows + v * kLanes);
          body(first + key, row, seen > first + key ? products : splat(-__builtin_inff()));
        }
      }
    }
  }
}

void sum_rows(const PrefillBlockScoresArguments& a, const ProbedHead& head, int32_t split, const Scratch& scratch,
              RowSums& to) {
  for (int32_t row = 0; row < kRows; row += kLanes) {
    store(to.peaks + row, splat(kLowestScore));
    store(to.sums + row, Vec{});
  }
  for_each_logit(a, head, split, scratch, [&](int32_t, int32_t row, Vec logits) {
    const Vec before = load(to.peaks + row);
    const Vec peak = maximum(before, logits);
    store(to.sums + row, load(to.sums + row) * exponential(before - peak) + exponential(logits - peak));
    store(to.peaks + row, peak);
  });
}

// Merges the sums of all splits into the first, and replaces the sum there by its inverse; by 0 for a row that is not
// probed.
void merge_rows(int32_t splits, RowSums* sums) {
  for (int32_t row = 0; row < kRows; row += kLanes) {
    Vec peak = splat(kLowestScore);
    Vec sum = {};
    for (int32_t split = 0; split < splits; ++split) peak = maximum(peak, load(sums[split].peaks + row));
    for (int32_t split = 0; split < splits; ++split) {
      sum += load(sums[split].sums + row) * exponential(load(sums[split].peaks + row) - peak);
    }
    store(sums[0].peaks + row, peak);
    store(sums[0].sums + row, sum == 0 ? Vec{} : 1.0f / sum);
  }
}

// Writes the verticals of a split's keys, and what they add to slashes.
void sum_lines(const PrefillBlockScoresArguments& a, const ProbedHead& head, int32_t split, const Scratch& scratch,
               const RowSums& rows, float* verticals, float* slashes) {
  std::memset(slashes, 0, kPaddedLags * sizeof(float));
  const int32_t first_lag = head.first_lag(split);
  for_each_logit(a, head, split, scratch, [&](int32_t key, int32_t row, Vec logits) {
    const Vec weights = exponential(logits - load(rows.peaks + row)) * load(rows.sums + row);
    verticals[key] = (row == 0 ? 0 : verticals[key]) + horizontal_sum(weights);
    float* of_lags = slashes + head.position(0) - key - first_lag + row;
    store(of_lags, load(of_lags) + weights);
  });
}

void find_maxima(const ProbedHead& head, const float* verticals, const float* slashes, const LineMaxima& to) {
  const int32_t tokens = head.first.tokens;
  for (int32_t block = 0; block < head.block_count; ++block) {
    to.verticals[block] = 0;
    for (int32_t key = block * kScoredBlockKeys; key < (block + 1) * kScoredBlockKeys && key < tokens; ++key) {
      to.verticals[block] = most_or_nan(to.verticals[block], verticals[key]);
    }
  }
  const auto slash = [&](int32_t lag) {
    if (lag < 0 || lag >= tokens) return 0.0f;
    float sum = 0;
    for (int32_t split = head.first_split(lag); split <= head.last_split(lag); ++split) {
      sum += slashes[split * kPaddedLags + lag - head.first_lag(split)];
    }
    return sum;
  };
  for (int32_t run = 0; run < head.runs(); ++run) {
    const int32_t lag = head.lag_of_run(run);
    to.runs[run] = 0;
    to.before[run] = 0;
    for (int32_t i = 0; i < kRunLags; ++i) to.runs[run] = most_or_nan(to.runs[run], slash(lag + i));
    for (int32_t i = 1; i < kRunLags; ++i) to.before[run] = most_or_nan(to.before[run], slash(lag - i));
  }
}

void write_scores(const PrefillBlockScoresArguments& a, const ProbedHead& head, const LineMaxima& maxima) {
  for (int32_t tile = 0; tile < a.tiles; ++tile) {
    const ScoredTile of(a, head.first.query_head, tile);
    for (int32_t block = 0; block < a.blocks; ++block) {
      const float line = block < of.seen() ? maxima.of(head, tile, block) : 0;
      of.scores[block] = __builtin_logf(line / static_cast<float>(head.probed));
    }
  }
}

}  // namespace

void vertical_slash_block_scores(const VerticalSlashBlockScoresArguments& a, Workers& workers) {
  const int32_t splits = ProbedHead::splits(a.blocks);
  const int32_t runs = ProbedHead::runs(a.tiles, a.blocks);
  const int64_t of_head = int64_t{splits} * (kSplitKeys + kPaddedLags) + a.blocks + 2 * runs;
  const size_t sums_bytes = static_cast<size_t>(a.query_heads) * static_cast<size_t>(splits) * sizeof(RowSums);
  auto* sums = static_cast<RowSums*>(workers.shared_scratch(
      sums_bytes + static_cast<size_t>(a.query_heads * of_head) * sizeof(float)));
  auto* lines = reinterpret_cast<float*>(sums + int64_t{a.query_heads} * splits);
  const auto for_each_split = [&](auto&& body) {
    workers.for_each(static_cast<size_t>(a.query_heads) * static_cast<size_t>(splits), [&](size_t index, int worker) {
      const ProbedHead head(a, static_cast<int64_t>(index) / splits);
      const Scratch scratch(workers.scratch(worker, Scratch::floats(a.head_dim) * sizeof(float)), a.head_dim);
      with_float_type(a.query_dtype, [&](auto element) { load_queries<decltype(element)>(a, head, scratch.queries); });
      body(head, static_cast<int32_t>(index % static_cast<size_t>(splits)), scratch);
    });
  };

  for_each_split([&](const ProbedHead& head, int32_t split, const Scratch& scratch) {
    sum_rows(a, head, split, scratch, sums[head.first.query_head * splits + split]);
  });
  workers.for_each(static_cast<size_t>(a.query_heads), [&](size_t head, int) {
    merge_rows(splits, sums + head * static_cast<size_t>(splits));
  });
  for_each_split([&](const ProbedHead& head, int32_t split, const Scratch& scratch) {
    float* verticals = lines + head.first.query_head * of_head;
    float* slashes = verticals + int64_t{splits} * kSplitKeys + int64_t{split} * kPaddedLags;
    sum_lines(a, head, split, scratch, sums[head.first.query_head * splits], verticals, slashes);
  });
  workers.for_each(static_cast<size_t>(a.query_heads), [&](size_t index, int) {
    const ProbedHead head(a, static_cast<int64_t>(index));
    float* verticals = lines + static_cast<int64_t>(index) * of_head;
    float* slashes = verticals + int64_t{splits} * kSplitKeys;
    float* maxima = slashes + int64_t{splits} * kPaddedLags;
    const LineMaxima to = {maxima, maxima + a.blocks, maxima + a.blocks + runs};
    find_maxima(head, verticals, slashes, to);
    write_scores(a, head, to);
  });
}

}  // namespace KV_ISA
}  // namespace kv
