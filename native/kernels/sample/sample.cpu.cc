#include "kernels/sample/sample.h"

#include "shared/random/philox.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

typedef double VecDouble __attribute__((vector_size(kLanes * 8)));

constexpr int64_t kChunk = 1024;
constexpr float kInfinity = __builtin_inff();

// The tokens that the filters have left, in ascending order.
struct Candidates {
  float* scores;   // logits after the penalty
  float* weights;  // probabilities relative to the greatest
  int32_t* tokens;
  int64_t count;

  void keep(int64_t to, int64_t from) {
    scores[to] = scores[from];
    weights[to] = weights[from];
    tokens[to] = tokens[from];
  }
};

struct Peak {
  float score;
  int64_t index;
};

// The greatest score, or NaN if any score is NaN.
float greatest_of(const float* scores, int64_t count) {
  Vec best = splat(-kInfinity);
  VecInt unordered = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec x = load(scores + i);
    unordered |= x != x;
    best = maximum(best, x);
  }
  float greatest = horizontal_maximum(best);
  bool ordered = true;
  for (int lane = 0; lane < kLanes; ++lane) ordered &= unordered[lane] == 0;
  for (; i < count; ++i) {
    ordered &= scores[i] == scores[i];
    if (scores[i] > greatest) greatest = scores[i];
  }
  return ordered ? greatest : __builtin_nanf("");
}

// The first of the greatest scores, or the first NaN.
Peak find_peak(const float* scores, int64_t count) {
  Peak peak = {-kInfinity, 0};
  for (int64_t start = 0; start < count; start += kChunk) {
    const float greatest = greatest_of(scores + start, count - start < kChunk ? count - start : kChunk);
    if (greatest != greatest) {
      peak = {greatest, start};
      break;
    }
    if (greatest > peak.score) peak = {greatest, start};
  }
  const bool ordered = peak.score == peak.score;
  while (ordered ? scores[peak.index] != peak.score : scores[peak.index] == scores[peak.index]) ++peak.index;
  return peak;
}

void weigh(Candidates& c, float greatest, float temperature) {
  int64_t i = 0;
  for (; i + kLanes <= c.count; i += kLanes) {
    store(c.weights + i, exponential((load(c.scores + i) - greatest) / temperature));
  }
  for (; i < c.count; ++i) c.weights[i] = exponential(splat((c.scores[i] - greatest) / temperature))[0];
}

double sum_of(const float* weights, int64_t count) {
  VecDouble sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += __builtin_convertvector(load(weights + i), VecDouble);
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  for (; i < count; ++i) total += static_cast<double>(weights[i]);
  return total;
}

// An unsigned integer that is greater for a greater score. Both zeros give the same number.
inline uint32_t order_of(float score) {
  const float plain = score + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &plain, 4);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// Keeps candidates, by higher score and then lower index, as long as the measures of those before them add up to less
// than `budget`. A radix selection finds the last kept score, eight bits at a time.
template <class Measure>
void keep_leading(Candidates& c, double budget, Measure measure) {
  uint32_t last = 0;
  double before = 0;  // measure of the candidates above every score that begins with `last`
  for (int shift = 24; shift >= 0; shift -= 8) {
    double buckets[256] = {};
    for (int64_t i = 0; i < c.count; ++i) {
      const uint32_t order = order_of(c.scores[i]);
      const bool within = shift == 24 || order >> (shift + 8) == last;
      if (within) buckets[(order >> shift) & 255] += measure(c.weights[i]);
    }
    uint32_t bucket = 255;
    while (bucket > 0 && before + buckets[bucket] < budget) before += buckets[bucket--];
    last = last << 8 | bucket;
  }
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    const uint32_t order = order_of(c.scores[i]);
    if (order < last || (order == last && before >= budget)) continue;
    if (order == last) before += measure(c.weights[i]);
    c.keep(kept++, i);
  }
  c.count = kept;
}

void keep_likely(Candidates& c, double least_weight) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    if (static_cast<double>(c.weights[i]) >= least_weight) c.keep(kept++, i);
  }
  c.count = kept;
}

// The candidate at which the cumulative weight, in token order, exceeds `uniform` times the total.
int64_t draw(const Candidates& c, double uniform) {
  const auto length_at = [&](int64_t start) { return c.count - start < kChunk ? c.count - start : kChunk; };
  double total = 0;
  for (int64_t start = 0; start < c.count; start += kChunk) {
    total += sum_of(c.weights + start, length_at(start));
  }
  const double target = uniform * total;
  double passed = 0;
  int64_t end = c.count;
  for (int64_t start = 0; start < c.count; start += kChunk) {
    const double sum = sum_of(c.weights + start, length_at(start));
    if (passed + sum > target) {
      end = start + length_at(start);
      for (int64_t i = start; i < end; ++i) {
        passed += static_cast<double>(c.weights[i]);
        if (passed > target) return i;
      }
      break;
    }
    passed += sum;
  }
  // Only rounding leads here. It is the last candidate that can be drawn.
  int64_t index = end - 1;
  while (c.weights[index] == 0) --index;
  return index;
}

int32_t draw_token(Candidates& c, float greatest, const SampleSettings& settings) {
  weigh(c, greatest, settings.temperature);
  for (int64_t i = 0; i < c.count; ++i) c.tokens[i] = static_cast<int32_t>(i);
  if (settings.top_k > 0 && settings.top_k < c.count) {
    keep_leading(c, static_cast<double>(settings.top_k), [](float) { return 1.0; });
  }
  if (settings.top_p < 1) {
    keep_leading(c, settings.top_p * sum_of(c.weights, c.count), [](float weight) { return double{weight}; });
  }
  if (settings.min_p > 0) keep_likely(c, settings.min_p);
  return c.tokens[draw(c, uniform_of(settings.seed, settings.step))];
}

// Writes the penalised scores of a row's recent tokens. A token that occurs twice is penalised once.
SampleOutcome penalise(const SampleArguments& a, int64_t row, float penalty, float* scores) {
  const float* logits = a.logits + row * a.logits_stride;
  const int32_t* recent = a.recent + row * a.recent_stride;
  for (int64_t i = 0; i < a.recent_tokens; ++i) {
    const int32_t token = recent[i];
    if (token == -1) continue;
    if (token < 0 || token >= a.vocabulary) return {SampleFault::recent_outside, token};
    scores[token] = logits[token] < 0 ? logits[token] * penalty : logits[token] / penalty;
  }
  return {};
}

SampleOutcome sample_row(const SampleArguments& a, int64_t row, void* scratch) {
  const SampleSettings& settings = a.settings[row];
  const size_t row_bytes = static_cast<size_t>(a.vocabulary) * sizeof(float);
  float* scores = static_cast<float*>(scratch);
  std::memcpy(scores, a.logits + row * a.logits_stride, row_bytes);
  if (settings.repetition_penalty != 1) {
    const SampleOutcome outcome = penalise(a, row, settings.repetition_penalty, scores);
    if (outcome.fault != SampleFault::none) return outcome;
  }
  const Peak peak = find_peak(scores, a.vocabulary);
  if (peak.score == -kInfinity) return {SampleFault::no_finite_logit, 0};
  if (!(peak.score < kInfinity)) return {SampleFault::unordered_logit, peak.index};
  if (settings.temperature == 0) {
    a.output[row] = static_cast<int32_t>(peak.index);
  } else {
    float* weights = scores + a.vocabulary;
    int32_t* tokens = reinterpret_cast<int32_t*>(weights + a.vocabulary);
    Candidates candidates = {scores, weights, tokens, a.vocabulary};
    a.output[row] = draw_token(candidates, peak.score, settings);
  }
  return {};
}

}  // namespace

void sample(const SampleArguments& a, Workers& workers) {
  const size_t scratch_bytes = 3 * static_cast<size_t>(a.vocabulary) * sizeof(float);
  workers.for_each(static_cast<size_t>(a.rows), [&](size_t index, int worker) {
    const int64_t row = static_cast<int64_t>(index);
    a.details[row] = sample_row(a, row, workers.scratch(worker, scratch_bytes));
  });
}

}  // namespace KV_ISA
}  // namespace kv
