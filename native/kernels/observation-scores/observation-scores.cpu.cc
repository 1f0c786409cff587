#include "kernels/observation-scores/observation-scores.h"

#include "shared/attention/attention-rows.cpu.h"
#include "shared/attention/prefill/key-tile.cpu.h"
#include "shared/cpu/transpose.cpu.h"
#include "shared/scores/small-scores.h"

namespace kv {
namespace KV_ISA {
namespace {

// Keys that are multiplied together. The lanes of a vector are keys here, so neither the softmax nor the sums need an
// operation across lanes.
constexpr int kPanelKeys = kPanelRows;
// Keys of one task. A fixed number, so that results do not depend on the number of workers.
constexpr int32_t kSplitKeys = 8 * kPanelKeys;

// The observation window of one batch entry, as one kv head sees it. Row r is query r % queries of query head
// first_head + r / queries.
struct Window {
  int64_t first_token;
  int64_t first_head;
  int64_t group;
  int64_t queries;
  int32_t key_count;
  int32_t prefix;
  bool sees_window;
  const int32_t* blocks;
  float* scores;

  Window(const ObservationScoresArguments& a, int64_t item)
      : first_token(a.query_start[item / a.kv_heads]),
        first_head(item % a.kv_heads * (a.query_heads / a.kv_heads)),
        group(a.query_heads / a.kv_heads),
        queries(a.query_start[item / a.kv_heads + 1] - first_token),
        sees_window(a.domain == ScoreDomain::full),
        scores(a.scores + item * a.score_tokens) {
    const int64_t cache_head = int64_t{a.slots[item / a.kv_heads]} * a.kv_heads + item % a.kv_heads;
    key_count = a.key_counts[cache_head];
    prefix = key_count > queries ? key_count - static_cast<int32_t>(queries) : 0;
    blocks = a.block_table + cache_head * a.table_width;
  }

  int64_t rows() const { return group * queries; }
  // How many of the first keys are in the denominator of a row, and the largest such number.
  int32_t visible(int64_t row) const {
    return sees_window ? prefix + static_cast<int32_t>(row % queries) + 1 : prefix;
  }
  int32_t reach() const { return sees_window ? key_count : prefix; }
  // The number of splits of the keys up to `end`. 0 if there is nothing to score.
  int64_t splits(int32_t end) const { return prefix == 0 || queries == 0 ? 0 : divide_up(end, kSplitKeys); }
};

// A denominator over some keys: the sum of exp(score - maximum).
struct Denominator {
  float maximum;
  float sum;
};

// The memory of one task.
struct Scratch {
  float* queries;   // [row, dim], scaled
  float* keys;      // [dim, key] of one panel
  float* products;  // [kStep, key]
  float* sums;      // [group, key] of one panel
  float* peaks;     // [group, key] of one panel: logarithms
  float* maxima;    // [row, lane]; with `totals`, the statistics of one split
  float* totals;

  static size_t floats(int64_t rows, int dim) {
    const int64_t padded = divide_up(rows, kStep) * kStep;
    return static_cast<size_t>(padded * dim + (dim + kStep + 2 * rows) * kPanelKeys + 2 * rows * kLanes);
  }

  Scratch(float* memory, int64_t rows, int64_t group, int dim) {
    queries = memory;
    keys = queries + divide_up(rows, kStep) * kStep * dim;
    products = keys + dim * kPanelKeys;
    sums = products + kStep * kPanelKeys;
    peaks = sums + group * kPanelKeys;
    maxima = peaks + group * kPanelKeys;
    totals = maxima + rows * kLanes;
  }
};

// Converts up to kPanelKeys keys to f32, [dim, key]. Keys from `count` on are zeros.
template <class T>
void load_keys(const ObservationScoresArguments& a, const int32_t* blocks, int32_t first_key, int32_t count,
               float* to) {
  for (int32_t base = 0; base < kPanelKeys; base += kLanes) {
    const T* keys[kLanes];
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      const int32_t key = first_key + base + lane;
      keys[lane] = base + lane < count ? static_cast<const T*>(a.keys) +
                                             blocks[key / a.block_tokens] * a.block_stride +
                                             key % a.block_tokens * a.token_stride
                                       : nullptr;
    }
    int d = 0;
    for (; d + kLanes <= a.head_dim; d += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) rows[lane] = keys[lane] ? load(keys[lane] + d) : Vec{};
      transpose(rows);
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes; ++lane) store(to + (d + lane) * kPanelKeys + base, rows[lane]);
    }
    for (; d < a.head_dim; ++d) {
      for (int lane = 0; lane < kLanes; ++lane) {
        to[d * kPanelKeys + base + lane] = keys[lane] ? to_float(keys[lane][d]) : 0;
      }
    }
  }
}

template <class T>
void load_queries(const ObservationScoresArguments& a, const Window& window, float* to) {
  for (int64_t row = 0; row < window.rows(); ++row) {
    const T* query = static_cast<const T*>(a.query) +
                     (window.first_token + row % window.queries) * a.query_token_stride +
                     (window.first_head + row / window.queries) * a.query_head_stride;
    for (int d = 0; d < a.head_dim; ++d) to[row * a.head_dim + d] = to_float(query[d]) * a.scale;
  }
  const int64_t rest = divide_up(window.rows(), kStep) * kStep - window.rows();
  std::memset(to + window.rows() * a.head_dim, 0, static_cast<size_t>(rest * a.head_dim) * sizeof(float));
}

// Calls body(row, the row's kPanelKeys products) for every row, for the panel of keys that is loaded.
template <class Body>
void for_each_row(const Window& window, int dim, const Scratch& scratch, Body&& body) {
  for (int64_t step = 0; step < window.rows(); step += kStep) {
    multiply<false>(scratch.queries + step * dim, dim, 1, scratch.keys, dim, nullptr, scratch.products);
    for (int64_t row = step; row < step + kStep && row < window.rows(); ++row) {
      body(row, scratch.products + (row - step) * kPanelKeys);
    }
  }
}

// Calls body(row, first_key, the row's kPanelKeys products) for every row and every panel of the split's keys before
// `end`. After each panel it calls panel_done(first_key, count).
template <class Body, class PanelDone>
void for_each_product(const ObservationScoresArguments& a, const Window& window, int64_t split, int32_t end,
                      const Scratch& scratch, Body&& body, PanelDone&& panel_done) {
  with_float_type(a.query_dtype,
                  [&](auto element) { load_queries<decltype(element)>(a, window, scratch.queries); });
  const int32_t begin = static_cast<int32_t>(split) * kSplitKeys;
  const int32_t last = begin + kSplitKeys < end ? begin + kSplitKeys : end;
  for (int32_t first_key = begin; first_key < last; first_key += kPanelKeys) {
    const int32_t count = last - first_key < kPanelKeys ? last - first_key : kPanelKeys;
    with_float_type(a.cache_dtype, [&](auto element) {
      load_keys<decltype(element)>(a, window.blocks, first_key, count, scratch.keys);
    });
    for_each_row(window, a.head_dim, scratch, [&](int64_t row, float* products) { body(row, first_key, products); });
    panel_done(first_key, count);
  }
}

// Hides the keys that are not in a row's denominator.
void mask(float* products, int32_t visible) {
  for (int32_t key = visible > 0 ? visible : 0; key < kPanelKeys; ++key) products[key] = -__builtin_inff();
}

// Sums up each row's denominator over the keys of one split.
void sum_denominators(const ObservationScoresArguments& a, const Window& window, int64_t split,
                      const Scratch& scratch, Denominator* denominators) {
  for (int64_t row = 0; row < window.rows(); ++row) {
    store(scratch.maxima + row * kLanes, splat(kLowestScore));
    store(scratch.totals + row * kLanes, Vec{});
  }
  const auto add = [&](int64_t row, int32_t first_key, float* products) {
    const int32_t visible = window.visible(row) - first_key;
    if (visible < kPanelKeys) mask(products, visible);
    const Vec before = load(scratch.maxima + row * kLanes);
    Vec peak = before;
    for (int v = 0; v < kPanelVectors; ++v) peak = maximum(peak, load(products + v * kLanes));
    Vec total = load(scratch.totals + row * kLanes) * exponential(before - peak);
    for (int v = 0; v < kPanelVectors; ++v) total += exponential(load(products + v * kLanes) - peak);
    store(scratch.maxima + row * kLanes, peak);
    store(scratch.totals + row * kLanes, total);
  };
  for_each_product(a, window, split, window.reach(), scratch, add, [](int32_t, int32_t) {});
  for (int64_t row = 0; row < window.rows(); ++row) {
    const Vec maxima = load(scratch.maxima + row * kLanes);
    const float peak = horizontal_maximum(maxima);
    const Vec totals = load(scratch.totals + row * kLanes) * exponential(maxima - peak);
    denominators[row] = {peak, horizontal_sum(totals)};
  }
}

// Merges the denominators of all splits of a row into the first, and replaces the sum there by its inverse.
void merge_denominators(int64_t rows, int64_t splits, Denominator* denominators) {
  for (int64_t row = 0; row < rows; ++row) {
    float peak = kLowestScore;
    for (int64_t split = 0; split < splits; ++split) {
      const float largest = denominators[split * rows + row].maximum;
      peak = largest > peak ? largest : peak;
    }
    float sum = 0;
    for (int64_t split = 0; split < splits; ++split) {
      const Denominator part = denominators[split * rows + row];
      sum += part.sum * exponential(splat(part.maximum - peak))[0];
    }
    denominators[row] = {peak, 1.0f / sum};
  }
}

// Computes the scores of a panel's keys from each head's sums over the window.
void reduce_group(GroupReduction reduction, int64_t group, const float* sums, int32_t count, float* scores) {
  for (int32_t key = 0; key < count; ++key) {
    float score = sums[key];
    for (int64_t head = 1; head < group; ++head) {
      const float other = sums[head * kPanelKeys + key];
      if (reduction == GroupReduction::maximum) {
        score = other > score ? other : score;
      } else {
        score += other;
      }
    }
    scores[key] = reduction == GroupReduction::mean ? score / static_cast<float>(group) : score;
  }
}

bool any_small(const float* scores, int32_t count) {
  for (int32_t key = 0; key < count; ++key) {
    if (scores[key] < kSmallScore) return true;
  }
  return false;
}

constexpr double kLog2E = 1.4426950408889634;
constexpr float kLowestLogarithm = -1e9f;

// Computes again the scores of the loaded panel that are too small for f32, from the logarithms of weights.
void add_small_weights(const ObservationScoresArguments& a, const Window& window, const Scratch& scratch,
                       const Denominator* denominators, int32_t count, float* scores) {
  for (int64_t i = 0; i < window.group * kPanelKeys; ++i) {
    scratch.peaks[i] = kLowestScore;
    scratch.sums[i] = 0;
  }
  for_each_row(window, a.head_dim, scratch, [&](int64_t row, const float* products) {
    const int64_t head = row / window.queries;
    const float log_sum = -__builtin_logf(denominators[row].sum);
    for (int v = 0; v < kPanelVectors; ++v) {
      float* peaks = scratch.peaks + head * kPanelKeys + v * kLanes;
      float* sums = scratch.sums + head * kPanelKeys + v * kLanes;
      const Vec logarithm = (load(products + v * kLanes) - denominators[row].maximum) - log_sum;
      const Vec before = load(peaks);
      const Vec peak = maximum(before, logarithm);
      store(sums, load(sums) * exponential(before - peak) + exponential(logarithm - peak));
      store(peaks, peak);
    }
  });
  for (int32_t key = 0; key < count; ++key) {
    if (!(scores[key] < kSmallScore)) continue;
    float highest = kLowestScore;
    for (int64_t head = 0; head < window.group; ++head) {
      const float peak = scratch.peaks[head * kPanelKeys + key];
      highest = peak > highest ? peak : highest;
    }
    for (int64_t head = 0; head < window.group; ++head) {
      const int64_t i = head * kPanelKeys + key;
      scratch.sums[i] *= exponential(splat(scratch.peaks[i] - highest))[0];
    }
    reduce_group(a.reduction, window.group, scratch.sums + key, 1, scores + key);
    // e^highest as a power of two: a whole exponent and a factor.
    const double power = static_cast<double>(highest < kLowestLogarithm ? kLowestLogarithm : highest) * kLog2E;
    const int32_t whole = static_cast<int32_t>(power) - 1;
    const float rest = static_cast<float>((power - whole) / kLog2E);
    scores[key] = score_of(scores[key] * exponential(splat(rest))[0], whole);
  }
}

// Computes the scores of one split's keys. `denominators` hold inverse sums.
void sum_weights(const ObservationScoresArguments& a, const Window& window, int64_t split,
                 const Scratch& scratch, const Denominator* denominators) {
  const size_t sum_bytes = static_cast<size_t>(window.group * kPanelKeys) * sizeof(float);
  std::memset(scratch.sums, 0, sum_bytes);
  const auto add = [&](int64_t row, int32_t, const float* products) {
    float* sums = scratch.sums + row / window.queries * kPanelKeys;
    const Denominator denominator = denominators[row];
    for (int v = 0; v < kPanelVectors; ++v) {
      const Vec weight = exponential(load(products + v * kLanes) - denominator.maximum) * denominator.sum;
      store(sums + v * kLanes, load(sums + v * kLanes) + weight);
    }
  };
  const auto finish = [&](int32_t first_key, int32_t count) {
    float* scores = window.scores + first_key;
    reduce_group(a.reduction, window.group, scratch.sums, count, scores);
    if (any_small(scores, count)) add_small_weights(a, window, scratch, denominators, count, scores);
    std::memset(scratch.sums, 0, sum_bytes);
  };
  for_each_product(a, window, split, window.prefix, scratch, add, finish);
}

}  // namespace

void observation_scores(const ObservationScoresArguments& a, Workers& workers) {
  // An item is one kv head of one batch entry. Item i has the tasks task_start[i] .. task_start[i + 1] - 1. The
  // denominators of its tasks' rows begin at denominator_start[i].
  const int64_t items = int64_t{a.batch} * a.kv_heads;
  int64_t most_rows = 0;
  int64_t denominator_count = 0;
  for (int64_t item = 0; item < items; ++item) {
    const Window window(a, item);
    most_rows = window.rows() > most_rows ? window.rows() : most_rows;
    denominator_count += window.splits(window.reach()) * window.rows();
    if (window.queries == 0) {
      std::memset(window.scores, 0, static_cast<size_t>(window.prefix) * sizeof(float));
    }
  }
  const size_t start_bytes = static_cast<size_t>(items + 1) * sizeof(int64_t);
  int64_t* task_start = static_cast<int64_t*>(workers.shared_scratch(
      2 * start_bytes + static_cast<size_t>(denominator_count) * sizeof(Denominator)));
  int64_t* denominator_start = task_start + items + 1;
  Denominator* denominators = reinterpret_cast<Denominator*>(denominator_start + items + 1);

  // Calls body(window, split, the window's denominators, scratch) for every split of the keys up to end(window).
  const auto for_each_split = [&](auto&& end, auto&& body) {
    task_start[0] = denominator_start[0] = 0;
    for (int64_t item = 0; item < items; ++item) {
      const Window window(a, item);
      task_start[item + 1] = task_start[item] + window.splits(end(window));
      denominator_start[item + 1] = denominator_start[item] + window.splits(window.reach()) * window.rows();
    }
    workers.for_each(static_cast<size_t>(task_start[items]), [&](size_t index, int worker) {
      int64_t item = 0;
      while (static_cast<int64_t>(index) >= task_start[item + 1]) ++item;
      const Window window(a, item);
      void* memory = workers.scratch(worker, Scratch::floats(most_rows, a.head_dim) * sizeof(float));
      body(window, static_cast<int64_t>(index) - task_start[item], denominators + denominator_start[item],
           Scratch(static_cast<float*>(memory), window.rows(), window.group, a.head_dim));
    });
  };

  for_each_split([](const Window& window) { return window.reach(); },
                 [&](const Window& window, int64_t split, Denominator* of_window, const Scratch& scratch) {
                   sum_denominators(a, window, split, scratch, of_window + split * window.rows());
                 });
  workers.for_each(static_cast<size_t>(items), [&](size_t item, int) {
    const Window window(a, static_cast<int64_t>(item));
    const int64_t splits = window.splits(window.reach());
    if (splits > 0) merge_denominators(window.rows(), splits, denominators + denominator_start[item]);
  });
  for_each_split([](const Window& window) { return window.prefix; },
                 [&](const Window& window, int64_t split, Denominator* of_window, const Scratch& scratch) {
                   sum_weights(a, window, split, scratch, of_window);
                 });
}

}  // namespace KV_ISA
}  // namespace kv
