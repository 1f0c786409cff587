#include "kernels/decompose-attention/decompose-attention.h"

#include "kernels/decompose-attention/decompose-attention-rows.cpu.h"
#include "kernels/decompose-attention/decompose-attention-turns.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Rows of one task. A fixed number, so that results do not depend on the number of workers.
constexpr int32_t kRunTokens = 8 * kTileTokens;
// Samples of one task. Their regressors stay in the processor's cache.
constexpr int32_t kSampleRun = 64;
// The centre is the mean of at most so many first keys.
constexpr int32_t kCentreTokens = 1024;

// Sums over the keys of each run, without their centre. After add_up they are running sums.
struct KeySums {
  double* moments;  // [run, stride, stride]
  double* keys;     // [run, stride]
  double* plain;    // [run, stride], of keys before their rotation
};

// Takes arrays from one allocation. Without memory it only counts bytes.
class Carver {
 public:
  explicit Carver(char* memory = nullptr) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    T* taken = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return taken;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

// Computes one kv head after another. The workers share the loop of each step.
class Decomposition {
 public:
  Decomposition(const DecomposeAttentionArguments& a, Workers& workers)
      : a_(a),
        workers_(workers),
        interior_(a),
        layout_(a),
        stride_(padded(a.head_dim)),
        line_(padded(a.coefficients())),
        runs_(static_cast<int32_t>(divide_up(a.rows, kRunTokens))),
        samples_(interior_.own_samples(a.samples)),
        weight_(samples_ > 0 ? static_cast<double>(interior_.own_elements()) / samples_ : 0) {
    Carver counting;
    carve(counting);
    Carver carver(static_cast<char*>(workers.shared_scratch(counting.bytes())));
    carve(carver);
  }

  void run() {
    const Turns turns(a_, turn_tables_);
    draw_samples();
    for (int32_t head = 0; head < a_.kv_heads; ++head) {
      load_keys(turns, head);
      add_keys(head);
      add_rows(head);
      add_regressors(head);
      add_products_of_samples(head);
      solve_head(head);
      write_slash_and_vertical(turns, head);
      write_horizontal(head);
    }
  }

 private:
  void carve(Carver& carver) {
    const int64_t group = a_.group();
    turn_tables_ = carver.take<double>(static_cast<int64_t>(Turns::doubles(a_)));
    samples_at_ = carver.take<InteriorSample>(samples_);
    angles_ = carver.take<double>(int64_t{samples_} * 2 * a_.pairs);
    regressors_ = carver.take<double>(samples_ * line_);
    wanted_ = carver.take<double>(group * samples_);
    keys_ = carver.take<float>((a_.tokens + kStep) * stride_);
    plain_ = carver.take<float>((a_.tokens + kStep) * stride_);
    sums_.moments = carver.take<double>((runs_ + 1) * stride_ * stride_);
    sums_.keys = carver.take<double>((runs_ + 1) * stride_);
    sums_.plain = carver.take<double>((runs_ + 1) * stride_);
    rows_.mean = carver.take<float>(group * a_.rows);
    rows_.variance = carver.take<float>(group * a_.rows);
    rows_.log_shape = carver.take<float>(group * a_.rows);
    gram_ = carver.take<double>(line_ * line_);
    solution_ = carver.take<double>(group * line_);
    middle_ = carver.take<double>(line_);
    last_query_ = carver.take<float>(group * stride_);
    peaks_ = carver.take<double>(group * blocks());
    totals_ = carver.take<double>(group * blocks());
    slash_sums_ = carver.take<double>(group * (a_.tokens + 1));
    vertical_sums_ = carver.take<double>(group * (a_.tokens + 1));
  }

  int64_t blocks() const { return divide_up(a_.tokens, kTurnTokens); }
  float* key(int64_t token) const { return keys_ + token * stride_; }
  float* plain(int64_t token) const { return plain_ + token * stride_; }
  // The end of the keys that run `run` adds. They are the keys before the end of the interior of the run's first row;
  // for the last run, of the last row.
  int32_t run_end(int32_t run) const {
    return interior_.end(run < runs_ ? interior_.first_row + run * kRunTokens : a_.tokens - 1);
  }
  int32_t run_first(int32_t run) const {
    if (run > 0) return run_end(run - 1);
    return a_.seen_tokens > 0 ? interior_.end(a_.seen_tokens - 1) : interior_.sinks;
  }
  const float* last_query(int64_t head) const { return last_query_ + head * stride_; }

  // Line 1, and the part of line 11 that is the same for all heads.
  void draw_samples() {
    for_each_sample_run([&](int32_t first, int32_t end, int) {
      for (int32_t i = first; i < end; ++i) {
        samples_at_[i] = interior_.sample(i, samples_, a_.seed);
        double* angles = angles_ + int64_t{i} * 2 * a_.pairs;
        relative_angles(a_, samples_at_[i].row - samples_at_[i].key, angles);
        take_mean_angles(a_, interior_, samples_at_[i].row, angles);
      }
    });
  }

  template <class Body>
  void for_each_sample_run(Body&& body) {
    workers_.for_each(static_cast<size_t>(divide_up(samples_, kSampleRun)), [&](size_t index, int worker) {
      const int32_t first = static_cast<int32_t>(index) * kSampleRun;
      body(first, first + kSampleRun < samples_ ? first + kSampleRun : samples_, worker);
    });
  }

  template <class T>
  const T* stored_key(int64_t cache_head, int64_t token) const {
    const int32_t block = a_.block_table[cache_head * a_.table_width + token / a_.block_tokens];
    return static_cast<const T*>(a_.keys) + block * a_.block_stride + token % a_.block_tokens * a_.token_stride;
  }

  // Loads keys without their centre, and as they were before their rotation (line 2).
  void load_keys(const Turns& turns, int32_t head) {
    with_float_type(a_.cache_dtype, [&](auto element) { load_keys<decltype(element)>(turns, head); });
    with_float_type(a_.query_dtype, [&](auto element) { load_last_queries<decltype(element)>(head); });
  }

  template <class T>
  void load_keys(const Turns& turns, int32_t head) {
    const int64_t cache_head = int64_t{a_.slots[0]} * a_.kv_heads + head;
    double* centre = layout_.centre(a_.state, head);
    if (a_.seen_tokens == 0) {
      const int32_t count = a_.tokens < kCentreTokens ? a_.tokens : kCentreTokens;
      for (int64_t d = 0; d < a_.head_dim; ++d) {
        double sum = 0;
        for (int32_t token = 0; token < count; ++token) sum += static_cast<double>(to_float(stored_key<T>(cache_head, token)[d]));
        centre[d] = static_cast<double>(static_cast<float>(sum / count));
      }
    }
    workers_.for_each(static_cast<size_t>(blocks()), [&](size_t index, int worker) {
      const int32_t first = static_cast<int32_t>(index) * kTurnTokens;
      const int32_t count = a_.tokens - first < kTurnTokens ? a_.tokens - first : kTurnTokens;
      for (int32_t i = 0; i < count; ++i) {
        load_row(stored_key<T>(cache_head, first + i), key(first + i), a_.head_dim, static_cast<int>(stride_));
      }
      turns.undo(first, count, key(first), stride_, turn_memory(worker), plain(first));
      for (int32_t i = 0; i < count; ++i) {
        for (int64_t d = 0; d < a_.head_dim; ++d) key(first + i)[d] -= static_cast<float>(centre[d]);
      }
    });
    std::memset(key(a_.tokens), 0, static_cast<size_t>(kStep * stride_) * sizeof(float));
  }

  double* turn_memory(int worker) const {
    return static_cast<double*>(workers_.scratch(worker, size_t{2} * static_cast<size_t>(a_.pairs) * sizeof(double)));
  }

  template <class T>
  void load_last_queries(int32_t head) {
    for (int64_t g = 0; g < a_.group(); ++g) {
      const T* from = static_cast<const T*>(a_.query) + (int64_t{a_.query_start[1]} - 1) * a_.query_token_stride +
                      (head * a_.group() + g) * a_.query_head_stride;
      float* to = last_query_ + g * stride_;
      load_row(from, to, a_.head_dim, static_cast<int>(stride_));
      for (int64_t d = 0; d < a_.head_dim; ++d) to[d] *= a_.scale;
    }
  }

  // Adds up the keys of each run, on top of the earlier runs and the earlier calls.
  void add_keys(int32_t head) {
    const int64_t square = stride_ * stride_;
    workers_.for_each(static_cast<size_t>(runs_) + 1, [&](size_t index, int worker) {
      const int32_t run = static_cast<int32_t>(index);
      double* moments = sums_.moments + run * square;
      double* sum = sums_.keys + run * stride_;
      double* plain_sum = sums_.plain + run * stride_;
      std::memset(moments, 0, static_cast<size_t>(square) * sizeof(double));
      std::memset(sum, 0, static_cast<size_t>(stride_) * sizeof(double));
      std::memset(plain_sum, 0, static_cast<size_t>(stride_) * sizeof(double));
      float* products = static_cast<float*>(workers_.scratch(worker, static_cast<size_t>(square) * sizeof(float)));
      for (int32_t first = run_first(run); first < run_end(run); first += kTileTokens) {
        const int32_t count = run_end(run) - first < kTileTokens ? run_end(run) - first : kTileTokens;
        std::memset(products, 0, static_cast<size_t>(square) * sizeof(float));
        add_products(key(first), stride_, count, 0, stride_, products, [&](int64_t) { return stride_ - 1; });
        for (int64_t i = 0; i < square; ++i) moments[i] += static_cast<double>(products[i]);
        for (int32_t i = 0; i < count; ++i) add_key(first + i, sum, plain_sum);
      }
    });
    const bool seen = a_.seen_tokens > 0;
    add_up(sums_.moments, square, a_.head_dim, seen, layout_.moments(a_.state, head));
    add_up(sums_.keys, stride_, 1, seen, layout_.key_sum(a_.state, head));
    add_up(sums_.plain, stride_, 1, seen, layout_.plain_sum(a_.state, head));
  }

  void add_key(int32_t token, double* sum, double* plain_sum) const {
    for (int64_t d = 0; d < a_.head_dim; ++d) {
      sum[d] += static_cast<double>(key(token)[d]);
      plain_sum[d] += static_cast<double>(plain(token)[d]);
    }
  }

  // Turns the sums of runs, of `size` numbers each, into running sums. The state holds the first head_dim numbers of
  // each of `lines` lines.
  void add_up(double* sums, int64_t size, int64_t lines, bool seen, double* state) {
    workers_.for_each(static_cast<size_t>(lines), [&](size_t line, int) {
      for (int64_t d = 0; d < a_.head_dim; ++d) {
        double& kept = state[static_cast<int64_t>(line) * a_.head_dim + d];
        double sum = seen ? kept : 0;
        for (int32_t run = 0; run <= runs_; ++run) {
          double& of_run = sums[run * size + static_cast<int64_t>(line) * stride_ + d];
          sum += of_run;
          of_run = sum;
        }
        kept = sum;
      }
    });
  }

  void add_rows(int32_t head) {
    workers_.for_each(static_cast<size_t>(runs_), [&](size_t index, int worker) {
      const int32_t run = static_cast<int32_t>(index);
      const int64_t square = stride_ * stride_;
      const size_t floats = static_cast<size_t>(square + stride_) + RowTile::floats(a_, stride_);
      float* moments = static_cast<float*>(workers_.scratch(worker, floats * sizeof(float)));
      float* sum = moments + square;
      for (int64_t i = 0; i < square; ++i) moments[i] = static_cast<float>(sums_.moments[run * square + i]);
      for (int64_t d = 0; d < stride_; ++d) sum[d] = static_cast<float>(sums_.keys[run * stride_ + d]);
      const RowTile tile{a_, interior_, head, stride_, keys_, moments, sum, rows_};
      const int32_t end = (run + 1) * kRunTokens < a_.rows ? (run + 1) * kRunTokens : a_.rows;
      for (int32_t first = run * kRunTokens; first < end; first += kTileTokens) {
        const int32_t count = end - first < kTileTokens ? end - first : kTileTokens;
        tile.add(first, count, sum + stride_);
        const int32_t from = interior_.end(interior_.first_row + first);
        const int32_t to = interior_.end(interior_.first_row + first + count);
        add_products(key(from), stride_, to - from, 0, stride_, moments, [&](int64_t) { return stride_ - 1; });
        for (int32_t token = from; token < to; ++token) {
          for (int64_t d = 0; d < a_.head_dim; ++d) sum[d] += key(token)[d];
        }
      }
    });
  }

  // The other part of line 11, and line 12. Samples that are not finite are left out.
  void add_regressors(int32_t head) {
    for_each_sample_run([&](int32_t first, int32_t end, int worker) {
      double* sum = static_cast<double*>(workers_.scratch(worker, static_cast<size_t>(stride_ * 2) * sizeof(double)));
      double* unused = sum + stride_;
      const int32_t run = (samples_at_[first].row - interior_.first_row) / kRunTokens;
      std::memcpy(sum, sums_.plain + run * stride_, static_cast<size_t>(stride_) * sizeof(double));
      int32_t summed = run_end(run);
      for (int32_t i = first; i < end; ++i) {
        const InteriorSample sample = samples_at_[i];
        for (; summed < interior_.end(sample.row); ++summed) add_key(summed, unused, sum);
        double* line = regressors_ + i * line_;
        std::memset(line, 0, static_cast<size_t>(line_) * sizeof(double));
        bool finite = true;
        for (int64_t g = 0; g < a_.group(); ++g) {
          wanted_[g * samples_ + i] = centred_logit(head, g, sample);
          finite = finite && __builtin_isfinite(wanted_[g * samples_ + i]);
        }
        if (!finite) {
          for (int64_t g = 0; g < a_.group(); ++g) wanted_[g * samples_ + i] = 0;
          continue;
        }
        std::memcpy(line, angles_ + int64_t{i} * 2 * a_.pairs, static_cast<size_t>(2 * a_.pairs) * sizeof(double));
        const double count = interior_.count(sample.row);
        for (int64_t d = 0; d < a_.head_dim; ++d) {
          line[2 * a_.pairs + d] = static_cast<double>(plain(sample.key)[d]) - sum[d] / count;
        }
      }
    });
  }

  double centred_logit(int32_t head, int64_t g, InteriorSample sample) const {
    float logit = 0;
    with_float_type(a_.query_dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t row = sample.row - interior_.first_row;
      const T* query = static_cast<const T*>(a_.query) + (a_.query_start[0] + row) * a_.query_token_stride +
                       (head * a_.group() + g) * a_.query_head_stride;
      const float* of_key = key(sample.key);
      for (int64_t d = 0; d < a_.head_dim; ++d) logit += to_float(query[d]) * a_.scale * of_key[d];
    });
    return static_cast<double>(logit - rows_.mean[g * a_.rows + sample.row - interior_.first_row]);
  }

  // Adds the normal equations to those of earlier calls. Each call counts for as many elements as it draws from.
  void add_products_of_samples(int32_t head) {
    const int64_t n = a_.coefficients();
    double* kept = layout_.gram(a_.state, head);
    const bool seen = a_.seen_tokens > 0;
    constexpr int64_t kLines = 16;
    workers_.for_each(static_cast<size_t>(divide_up(n, kLines)), [&](size_t index, int) {
      const int64_t first = static_cast<int64_t>(index) * kLines;
      const int64_t end = first + kLines < line_ ? first + kLines : line_;
      std::memset(gram_ + first * line_, 0, static_cast<size_t>((end - first) * line_) * sizeof(double));
      for (int32_t i = 0; i < samples_; i += kSampleRun) {
        const int64_t count = samples_ - i < kSampleRun ? samples_ - i : kSampleRun;
        add_products(regressors_ + i * line_, line_, count, first, end, gram_, [](int64_t row) { return row; });
      }
      for (int64_t row = first; row < end && row < n; ++row) {
        for (int64_t column = 0; column <= row; ++column) {
          double& sum = kept[row * n + column];
          sum = (seen ? sum : 0) + weight_ * gram_[row * line_ + column];
        }
      }
    });
    workers_.for_each(static_cast<size_t>(a_.group()), [&](size_t g, int) {
      double* sums = layout_.right_side(a_.state, head * a_.group() + static_cast<int64_t>(g));
      if (!seen) std::memset(sums, 0, static_cast<size_t>(n) * sizeof(double));
      for (int32_t i = 0; i < samples_; ++i) {
        const double factor = weight_ * wanted_[static_cast<int64_t>(g) * samples_ + i];
        for (int64_t c = 0; c < n; ++c) sums[c] += factor * regressors_[i * line_ + c];
      }
    });
  }

  // Line 13.
  void solve_head(int32_t head) {
    const int64_t n = a_.coefficients();
    const double* kept = layout_.gram(a_.state, head);
    double trace = 0;
    for (int64_t i = 0; i < n; ++i) trace += kept[i * n + i];
    for (int64_t row = 0; row < n; ++row) {
      std::memcpy(gram_ + row * line_, kept + row * n, static_cast<size_t>(row + 1) * sizeof(double));
      gram_[row * line_ + row] += a_.ridge * a_.ridge / 4 * trace;
    }
    if (!interior_.empty()) factor(gram_, n, line_);
    for (int64_t g = 0; g < a_.group(); ++g) {
      double* solution = solution_ + g * line_;
      std::memcpy(solution, layout_.right_side(a_.state, head * a_.group() + g), static_cast<size_t>(n) * sizeof(double));
      if (!interior_.empty()) solve(gram_, n, line_, solution);
    }
    // The negated means of the last row.
    std::memset(middle_, 0, static_cast<size_t>(line_) * sizeof(double));
    if (interior_.empty()) return;
    take_mean_angles(a_, interior_, a_.tokens - 1, middle_);
    const double count = interior_.count(a_.tokens - 1);
    for (int64_t d = 0; d < a_.head_dim; ++d) middle_[2 * a_.pairs + d] = -sums_.plain[runs_ * stride_ + d] / count;
  }

  // Lines 14 and 15, and the last row of line 6.
  void write_slash_and_vertical(const Turns& turns, int32_t head) {
    workers_.for_each(static_cast<size_t>(blocks()), [&](size_t index, int worker) {
      const int32_t first = static_cast<int32_t>(index) * kTurnTokens;
      const int32_t count = a_.tokens - first < kTurnTokens ? a_.tokens - first : kTurnTokens;
      double* base = turn_memory(worker);
      turns.turn(first, base, base + a_.pairs);
      for (int64_t g = 0; g < a_.group(); ++g) {
        const int64_t query_head = head * a_.group() + g;
        const double* alpha = solution_ + g * line_;
        const double* kappa = alpha + 2 * a_.pairs;
        const double of_angles = -dot(middle_, alpha, 2 * a_.pairs);
        const double of_keys = dot(middle_ + 2 * a_.pairs, kappa, a_.head_dim);
        turns.slash(base, count, alpha, of_angles, a_.slash + query_head * a_.tokens + first);
        for (int32_t i = 0; i < count; ++i) {
          const double value = of_keys + dot(plain(first + i), kappa, a_.head_dim);
          a_.vertical[query_head * a_.tokens + first + i] = static_cast<float>(value);
        }
        add_last_row(g, first, count, g * blocks() + static_cast<int64_t>(index));
      }
    });
  }

  void add_last_row(int64_t g, int32_t first, int32_t count, int64_t to) const {
    const double mean = static_cast<double>(rows_.mean[g * a_.rows + a_.rows - 1]);
    double logits[kTurnTokens];
    double peak = -__builtin_inf();
    int32_t kept = 0;
    for (int32_t token = first; token < first + count; ++token) {
      if (token < interior_.sinks || token >= interior_.end(a_.tokens - 1)) continue;
      const double logit = static_cast<double>(dot(last_query(g), key(token), stride_)) - mean;
      peak = logit > peak ? logit : peak;
      logits[kept++] = logit;
    }
    double total = 0;
    for (int32_t i = 0; i < kept; ++i) total += __builtin_exp(logits[i] - peak);
    peaks_[to] = peak;
    totals_[to] = total;
  }

  // Lines 16 to 19.
  void write_horizontal(int32_t head) {
    const bool as_printed = a_.formulas == DecompositionFormulas::paper;
    workers_.for_each(static_cast<size_t>(a_.group()), [&](size_t index, int) {
      const int64_t g = static_cast<int64_t>(index);
      const int64_t query_head = head * a_.group() + g;
      double* of_lags = slash_sums_ + g * (a_.tokens + 1);
      double* of_keys = vertical_sums_ + g * (a_.tokens + 1);
      of_lags[0] = of_keys[0] = 0;
      for (int64_t i = 0; i < a_.tokens; ++i) {
        of_lags[i + 1] = of_lags[i] + static_cast<double>(a_.slash[query_head * a_.tokens + i]);
        of_keys[i + 1] = of_keys[i] + static_cast<double>(a_.vertical[query_head * a_.tokens + i]);
      }
      const double zeta = interior_.empty() ? 0 : last_row_correction(g);
      const int32_t sinks = interior_.sinks;
      for (int32_t i = 0; i < a_.rows; ++i) {
        const int32_t row = interior_.first_row + i;
        const int32_t count = interior_.count(row);
        const int32_t end = interior_.end(row);
        const double shape = static_cast<double>(rows_.log_shape[g * a_.rows + i]);
        double value = -shape;
        if (count > 0) {
          const double drift = as_printed ? of_lags[end] - of_lags[sinks > 0 ? sinks - 1 : 0]
                                          : of_lags[row - sinks + 1] - of_lags[interior_.diagonal] + of_keys[end] - of_keys[sinks];
          const double inside = __builtin_log(count) + static_cast<double>(rows_.variance[g * a_.rows + i]) / 2 - zeta;
          const double high = shape < inside ? inside : shape;
          const double low = shape < inside ? shape : inside;
          value = -drift / count - (high + __builtin_log1p(__builtin_exp(low - high)));
        }
        a_.horizontal[query_head * a_.rows + i] = static_cast<float>(value);
      }
    });
  }

  double last_row_correction(int64_t g) const {
    const double* peaks = peaks_ + g * blocks();
    double peak = -__builtin_inf();
    for (int64_t i = 0; i < blocks(); ++i) peak = peaks[i] > peak ? peaks[i] : peak;
    double total = 0;
    for (int64_t i = 0; i < blocks(); ++i) {
      if (totals_[g * blocks() + i] != 0) total += totals_[g * blocks() + i] * __builtin_exp(peaks[i] - peak);
    }
    const double variance = static_cast<double>(rows_.variance[g * a_.rows + a_.rows - 1]);
    const double count = interior_.count(a_.tokens - 1);
    return variance / 2 - (peak + __builtin_log(total)) + (a_.formulas == DecompositionFormulas::paper ? 0 : __builtin_log(count));
  }

  const DecomposeAttentionArguments& a_;
  Workers& workers_;
  const Interior interior_;
  const DecompositionState layout_;
  const int64_t stride_;  // of keys, in elements
  const int64_t line_;    // of regressors, in elements
  const int32_t runs_;
  const int32_t samples_;
  const double weight_;

  double* turn_tables_ = nullptr;
  InteriorSample* samples_at_ = nullptr;
  double* angles_ = nullptr;      // [sample, 2 * pair]: the part of A that all kv heads share
  double* regressors_ = nullptr;  // [sample, line]: A of line 11
  double* wanted_ = nullptr;      // [group, sample]: b of line 12
  float* keys_ = nullptr;         // [token, stride]
  float* plain_ = nullptr;        // [token, stride]
  KeySums sums_ = {};
  RowStatistics rows_ = {};
  double* gram_ = nullptr;      // [line, line]
  double* solution_ = nullptr;  // [group, line]
  double* middle_ = nullptr;    // [line]
  float* last_query_ = nullptr;  // [group, stride], scaled
  double* peaks_ = nullptr;      // [group, block] of the last row; `totals` are the sums that go with them
  double* totals_ = nullptr;
  double* slash_sums_ = nullptr;  // [group, token + 1]
  double* vertical_sums_ = nullptr;
};

}  // namespace

void decompose_attention(const DecomposeAttentionArguments& a, Workers& workers) { Decomposition(a, workers).run(); }

}  // namespace KV_ISA
}  // namespace kv
