// Several thread blocks find the greatest logit of a row, each in a part of the vocabulary. The last of them writes the token.
#include <algorithm>

#include "kernels/sample/sample.cuda.h"
#include "shared/cuda/arrivals.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

constexpr int kGreedyThreads = 512;
constexpr int kScoresOfLoad = 4;
constexpr int64_t kPartTokens = 4 * kGreedyThreads * kScoresOfLoad;  // that are worth a thread block
constexpr int64_t kGreedyBlocks = 512;                               // about as many as run at once
constexpr uint32_t kNone = UINT32_MAX;                               // no index

// What the thread blocks of a row have found. All zero before and after.
struct FoundPeak {
  unsigned long long peak;
  unsigned arrivals;
};

struct GreedyLaunch {
  SampleArguments arguments;
  int64_t parts;  // of a row
  int64_t part;   // its tokens, a multiple of kScoresOfLoad
  FoundPeak* found;  // [row]
  FaultSink faults;
};

// Greater for a greater score, and for a lower index of the same one. Zero for no score.
__device__ unsigned long long peak_of(uint32_t order, uint32_t index) {
  return static_cast<unsigned long long>(order) << 32 | ~index;
}

// The greatest of a warp's, in every lane.
__device__ unsigned long long warp_peak(uint32_t order, uint32_t index) {
  const uint32_t greatest = __reduce_max_sync(0xffffffffu, order);
  return peak_of(greatest, __reduce_min_sync(0xffffffffu, order == greatest ? index : kNone));
}

// The greatest of the scores that a thread has seen, in the order of their indices. NaN and +infinity count as +infinity.
class ThreadPeak {
 public:
  __device__ void see(float score, int64_t index) {
    const float ordered = fminf(score, INFINITY);
    if (!(ordered > score_) && index_ != kNone) return;
    score_ = ordered;
    index_ = static_cast<uint32_t>(index);
  }
  __device__ unsigned long long of_warp() const { return warp_peak(index_ == kNone ? 0 : ordered_bits(score_), index_); }

 private:
  float score_ = -INFINITY;
  uint32_t index_ = kNone;
};

// `Load` is kScoresOfLoad scores, or one.
template <class Load>
__global__ void __launch_bounds__(kGreedyThreads) find_peaks(const __grid_constant__ GreedyLaunch launch) {
  constexpr int kOfLoad = sizeof(Load) / sizeof(float);
  __shared__ unsigned long long peaks[kGreedyThreads / kWarp];
  ptx::follow_previous_kernel();
  const SampleArguments& a = launch.arguments;
  const int64_t row = blockIdx.x / launch.parts;
  const int64_t begin = blockIdx.x % launch.parts * launch.part;
  const int64_t end = min(begin + launch.part, a.vocabulary);
  const float* scores = a.logits + row * a.logits_stride;
  ThreadPeak peak;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x * kOfLoad; i < end; i += kGreedyThreads * kOfLoad) {
    const Load load = *reinterpret_cast<const Load*>(scores + i);
#pragma unroll
    for (int next = 0; next < kOfLoad; ++next) peak.see(reinterpret_cast<const float*>(&load)[next], i + next);
  }
  const unsigned long long of_warp = peak.of_warp();
  if (threadIdx.x % kWarp == 0) peaks[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  if (threadIdx.x != 0) return;
  unsigned long long greatest = 0;
  for (const unsigned long long each : peaks) greatest = max(greatest, each);
  FoundPeak& found = launch.found[row];
  atomicMax(&found.peak, greatest);
  if (!arrives_last(found.arrivals, static_cast<unsigned>(launch.parts))) return;
  const auto index = static_cast<int32_t>(~static_cast<uint32_t>(atomicExch(&found.peak, 0)));
  const float score = scores[index];
  begin_row(a, row);
  if (score == -INFINITY) return refuse_row(a, launch.faults, SampleFault::no_finite_logit, index, row);
  if (!(score < INFINITY)) return refuse_row(a, launch.faults, SampleFault::unordered_logit, index, row);
  a.output[row] = index;
}

int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

}  // namespace

Status sample_greedily(const SampleArguments& a, ExecutionContext& context) {
  if (a.rows == 0) return Status::success();
  auto* found = static_cast<FoundPeak*>(context.zeroed_workspace(static_cast<size_t>(a.rows) * sizeof(FoundPeak)));
  if (found == nullptr) return Status::failure(StatusCode::out_of_memory, "no room for its counters");
  const int64_t wanted = std::max<int64_t>(1, std::min(kGreedyBlocks / a.rows, a.vocabulary / kPartTokens));
  const int64_t part = round_up((a.vocabulary + wanted - 1) / wanted, kScoresOfLoad);
  const int64_t parts = (a.vocabulary + part - 1) / part;
  const bool vectors = reinterpret_cast<uintptr_t>(a.logits) % sizeof(float4) == 0 && a.logits_stride % kScoresOfLoad == 0 &&
                       a.vocabulary % kScoresOfLoad == 0;
  const GreedyLaunch launch{a, parts, part, found, context.faults(describe_sample_fault)};
  return launch_overlapped(vectors ? find_peaks<float4> : find_peaks<float>, static_cast<unsigned>(a.rows * parts), kGreedyThreads,
                           0, stream_of(context), launch);
}

}  // namespace kv
