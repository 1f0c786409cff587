// Each thread block chooses the token of one row. Nothing is sorted or moved. In the order "higher score, then lower
// index", the filters always keep the first candidates, so the last kept candidate describes them all. Weights are
// integers: their sums do not depend on the order of summation, and a draw is exact.
#include <algorithm>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/sample/sample.cuda.h"
#include "shared/cuda/elements.cuda.h"

#define KV_ISA cuda
#include "shared/random/philox.h"

namespace kv {
namespace {

constexpr int kThreads = 1024;
constexpr int kBuckets = 256;
constexpr int kRows = 64;  // rows of a launch, whose settings are its parameter; a parameter has room for 4 KiB
constexpr float kWeightUnit = 0x1p44f;  // the weights of 2^19 tokens add up within 64 bits

struct Launch {
  SampleArguments arguments;
  int64_t first_row;
  float* scores;  // [row, vocabulary], for rows with a penalty
  FaultSink faults;
  SampleSettings settings[kRows];
};

struct Peak {
  float score;
  int64_t index;
};

struct HigherScore {
  __device__ Peak operator()(const Peak& a, const Peak& b) const {
    return b.score > a.score || (b.score == a.score && b.index < a.index) ? b : a;
  }
};

using PeakReduce = cub::BlockReduce<Peak, kThreads>;
using Reduce = cub::BlockReduce<unsigned long long, kThreads>;
using Scan = cub::BlockScan<unsigned long long, kThreads>;

union Storage {
  typename PeakReduce::TempStorage peak;
  typename Reduce::TempStorage reduce;
  typename Scan::TempStorage scan;
  unsigned long long buckets[kBuckets];
};

struct Shared {
  Storage storage;
  Peak peak;
  unsigned long long sum;
  unsigned long long before;
  unsigned long long within;
  uint32_t bucket;
  int64_t index;
};

class Row {
 public:
  __device__ Row(const Launch& launch, Shared& shared)
      : a_(launch.arguments),
        faults_(launch.faults),
        settings_(launch.settings[blockIdx.x]),
        shared_(shared),
        row_(launch.first_row + blockIdx.x),
        thread_(threadIdx.x),
        scores_(a_.logits + row_ * a_.logits_stride),
        last_index_(a_.vocabulary) {
    if (launch.scores != nullptr) penalised_ = launch.scores + blockIdx.x * a_.vocabulary;
  }

  __device__ void choose() {
    if (thread_ == 0) begin_row(a_, row_);
    if (settings_.repetition_penalty != 1 && !penalise()) return;
    const Peak peak = find_peak();
    if (!(peak.score < INFINITY) || peak.score == -INFINITY) {
      if (thread_ != 0) return;
      if (peak.score == -INFINITY) {
        refuse(SampleFault::no_finite_logit, peak.index);
      } else {
        refuse(SampleFault::unordered_logit, peak.index);
      }
      return;
    }
    if (settings_.temperature == 0) {
      if (thread_ == 0) a_.output[row_] = static_cast<int32_t>(peak.index);
      return;
    }
    greatest_ = peak.score;
    const auto count = [](float) { return 1ull; };
    const auto weight = [this](float score) { return weight_of(score); };
    if (settings_.top_k > 0 && settings_.top_k < a_.vocabulary) {
      keep_leading(static_cast<unsigned long long>(settings_.top_k), count);
    }
    if (settings_.top_p < 1) {
      const double share = settings_.top_p * static_cast<double>(sum_of(weight));
      keep_leading(static_cast<unsigned long long>(ceil(share)), weight);
    }
    draw();
  }

 private:
  __device__ void refuse(SampleFault fault, int64_t subject) { refuse_row(a_, faults_, fault, subject, row_); }

  // Writes all scores of the row, those of recent tokens penalised. A token that occurs twice is penalised once.
  __device__ bool penalise() {
    for (int64_t i = thread_; i < a_.vocabulary; i += kThreads) penalised_[i] = scores_[i];
    __syncthreads();
    const float penalty = settings_.repetition_penalty;
    bool inside = true;
    for (int64_t i = thread_; i < a_.recent_tokens; i += kThreads) {
      const int32_t token = a_.recent[row_ * a_.recent_stride + i];
      if (token == -1) continue;
      if (token < 0 || token >= a_.vocabulary) {
        inside = false;
        refuse(SampleFault::recent_outside, token);
        continue;
      }
      penalised_[token] = scores_[token] < 0 ? scores_[token] * penalty : scores_[token] / penalty;
    }
    inside = __syncthreads_and(inside);
    scores_ = penalised_;
    return inside;
  }

  // The first of the greatest scores. NaN and +infinity count as +infinity.
  __device__ Peak find_peak() {
    Peak best = {-INFINITY, a_.vocabulary};
    for (int64_t i = thread_; i < a_.vocabulary; i += kThreads) {
      const float score = scores_[i];
      best = HigherScore()(best, {score < INFINITY ? score : INFINITY, i});
    }
    best = PeakReduce(shared_.storage.peak).Reduce(best, HigherScore());
    if (thread_ == 0) shared_.peak = best;
    __syncthreads();
    return shared_.peak;
  }

  // The weight relative to the greatest score, whose weight is kWeightUnit.
  __device__ unsigned long long weight_of(float score) const {
    return __float2ull_rn(relative(score) * kWeightUnit);
  }
  __device__ float relative(float score) const { return expf((score - greatest_) / settings_.temperature); }

  __device__ bool kept(int64_t index, uint32_t order) const {
    return order > last_order_ || (order == last_order_ && index <= last_index_);
  }

  template <class Measure>
  __device__ unsigned long long sum_of(Measure measure) {
    unsigned long long sum = 0;
    for (int64_t i = thread_; i < a_.vocabulary; i += kThreads) {
      if (kept(i, ordered_bits(scores_[i]))) sum += measure(scores_[i]);
    }
    sum = Reduce(shared_.storage.reduce).Sum(sum);
    if (thread_ == 0) shared_.sum = sum;
    __syncthreads();
    return shared_.sum;
  }

  // Keeps candidates, in their order, as long as the measures of those before them add up to less than `budget`. A
  // radix selection finds the last kept score, eight bits at a time.
  template <class Measure>
  __device__ void keep_leading(unsigned long long budget, Measure measure) {
    uint32_t last = 0;
    unsigned long long before = 0;  // measure of the candidates above every score that begins with `last`
    for (int shift = 24; shift >= 0; shift -= 8) {
      measure_buckets(shift, last, measure);
      const unsigned long long own = thread_ < kBuckets ? shared_.storage.buckets[kBuckets - 1 - thread_] : 0;
      __syncthreads();
      unsigned long long higher = 0;
      Scan(shared_.storage.scan).ExclusiveSum(own, higher);
      higher += before;
      // Exactly one bucket is chosen: the one in which the budget ends, or else the lowest.
      const bool ends = higher + own >= budget || thread_ == kBuckets - 1;
      if (thread_ < kBuckets && (higher < budget || thread_ == 0) && ends) {
        shared_.bucket = static_cast<uint32_t>(kBuckets - 1 - thread_);
        shared_.before = higher;
        shared_.within = own;
      }
      __syncthreads();
      last = last << 8 | shared_.bucket;
      before = shared_.before;
    }
    const unsigned long long left = before < budget ? budget - before : 0;
    const int64_t index = shared_.within > left ? index_of_equal(last, left, measure) : a_.vocabulary;
    __syncthreads();
    if (last < last_order_) return;  // the budget ends after the last candidate that an earlier filter kept
    last_index_ = last == last_order_ && last_index_ < index ? last_index_ : index;
    last_order_ = last;
  }

  template <class Measure>
  __device__ void measure_buckets(int shift, uint32_t last, Measure measure) {
    if (thread_ < kBuckets) shared_.storage.buckets[thread_] = 0;
    __syncthreads();
    for (int64_t i = thread_; i < a_.vocabulary; i += kThreads) {
      const uint32_t order = ordered_bits(scores_[i]);
      if (!kept(i, order) || (shift < 24 && order >> (shift + 8) != last)) continue;
      atomicAdd(&shared_.storage.buckets[(order >> shift) % kBuckets], measure(scores_[i]));
    }
    __syncthreads();
  }

  // Among the candidates of order `last`, the index of the one at which their measures add up to `budget` or more.
  template <class Measure>
  __device__ int64_t index_of_equal(uint32_t last, unsigned long long budget, Measure measure) {
    return first_passing(budget, [&](int64_t i) {
      const uint32_t order = ordered_bits(scores_[i]);
      return order == last && kept(i, order) ? measure(scores_[i]) : 0ull;
    });
  }

  // The first index up to which `measure` adds up to `budget` or more.
  template <class Measure>
  __device__ int64_t first_passing(unsigned long long budget, Measure measure) {
    unsigned long long passed = 0;
    for (int64_t start = 0; start < a_.vocabulary; start += kThreads) {
      const int64_t i = start + thread_;
      const unsigned long long own = i < a_.vocabulary ? measure(i) : 0;
      unsigned long long before = 0;
      unsigned long long all = 0;
      Scan(shared_.storage.scan).ExclusiveSum(own, before, all);
      before += passed;
      if (before < budget && before + own >= budget) shared_.index = i;
      __syncthreads();
      passed += all;
      if (passed >= budget) return shared_.index;
    }
    return a_.vocabulary;
  }

  // The candidate at which the cumulative weight, in token order, exceeds the drawn part of the total.
  __device__ void draw() {
    const auto likely = [this](float score) {
      const float weight = relative(score);
      return static_cast<double>(weight) >= settings_.min_p ? __float2ull_rn(weight * kWeightUnit) : 0ull;
    };
    const unsigned long long total = sum_of(likely);
    const uint64_t drawn = cuda::random_53_bits(settings_.seed, settings_.step);
    // floor(total * drawn / 2^53), which is less than the total.
    const unsigned long long target = __umul64hi(total, drawn << 11);
    const int64_t index = first_passing(target + 1, [&](int64_t i) {
      return kept(i, ordered_bits(scores_[i])) ? likely(scores_[i]) : 0ull;
    });
    if (thread_ == 0) a_.output[row_] = static_cast<int32_t>(index);
  }

  const SampleArguments& a_;
  const FaultSink faults_;
  const SampleSettings& settings_;
  Shared& shared_;
  const int64_t row_;
  const int thread_;
  const float* scores_;
  float* penalised_ = nullptr;
  float greatest_ = 0;
  // The last candidate that the filters kept.
  uint32_t last_order_ = 0;
  int64_t last_index_;
};

__global__ void __launch_bounds__(kThreads) sample_rows(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  Row(launch, shared).choose();
}

bool is_greedy(const SampleSettings& settings) { return settings.temperature == 0 && settings.repetition_penalty == 1; }

}  // namespace

Status sample_cuda(const SampleArguments& a, ExecutionContext& context) {
  if (std::all_of(a.settings, a.settings + a.rows, is_greedy)) return sample_greedily(a, context);
  Launch launch{a, 0, nullptr, context.faults(describe_sample_fault), {}};
  for (int64_t first = 0; first < a.rows; first += kRows) {
    const int64_t rows = a.rows - first < kRows ? a.rows - first : kRows;
    launch.first_row = first;
    bool penalises = false;
    for (int64_t row = 0; row < rows; ++row) {
      launch.settings[row] = a.settings[first + row];
      penalises = penalises || launch.settings[row].repetition_penalty != 1;
    }
    launch.scores = nullptr;
    if (penalises) {
      const size_t bytes = static_cast<size_t>(rows * a.vocabulary) * sizeof(float);
      launch.scores = static_cast<float*>(context.workspace(bytes));
      if (launch.scores == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for penalised scores");
    }
    sample_rows<<<static_cast<unsigned>(rows), kThreads, 0, stream_of(context)>>>(launch);
  }
  return launch_status();
}

}  // namespace kv
