#include <cub/block/block_scan.cuh>

#include "kernels/select-top-blocks/select-top-blocks.h"
#define KV_ISA cuda
#include "shared/cuda/elements.cuda.h"
#include "shared/paged/entry-blocks.cuda.h"
#include "shared/scores/score-order.h"

namespace kv {
namespace {

constexpr int kThreads = 1024;
constexpr int kHeld = 11 * 1024;  // orders of scores that shared memory holds; those of more blocks are made each time

__device__ inline uint32_t order_of_score(float score) {
  return isnan(score) ? 0 : cuda::order_of(__float_as_uint(score + 0.0f));
}

// The candidates of a thread block.
class Candidates {
 public:
  __device__ Candidates(const float* scores, int count, uint32_t* held) : scores_(scores), held_(held), count_(count) {
    if (count_ > kHeld) return;
    for (int i = static_cast<int>(threadIdx.x); i < count_; i += kThreads) held_[i] = order_of_score(scores_[i]);
    __syncthreads();
  }

  __device__ uint32_t operator[](int i) const { return count_ <= kHeld ? held_[i] : order_of_score(scores_[i]); }

  // How many are `least` or more. `sum` is zero, and is another one in the next call.
  __device__ int count_from(uint32_t least, int& sum) const {
    int own = 0;
    for (int i = static_cast<int>(threadIdx.x); i < count_; i += kThreads) own += (*this)[i] >= least ? 1 : 0;
    own = __reduce_add_sync(0xffffffffu, own);
    if (threadIdx.x % kWarp == 0 && own != 0) atomicAdd(&sum, own);
    __syncthreads();
    return sum;
  }

  // The largest order that `wanted` candidates have or exceed; one that they alone do may be less.
  __device__ uint32_t reached_by(int wanted, int (&sums)[3]) const {
    uint32_t order = 0;
    for (int bit = 31, turn = 0; bit >= 0; --bit, turn = (turn + 1) % 3) {
      // The sum behind the next one: all threads have read it, and none adds to it before the next barrier.
      if (threadIdx.x == 0) sums[(turn + 1) % 3] = 0;
      const uint32_t tried = order | 1u << bit;
      const int count = count_from(tried, sums[turn]);
      if (count >= wanted) order = tried;
      if (count == wanted) break;
    }
    return order;
  }

 private:
  const float* scores_;
  uint32_t* held_;
  int count_;
};

// A thread block chooses the blocks of one kv head of an entry.
__global__ void __launch_bounds__(kThreads) select_blocks(const __grid_constant__ SelectTopBlocksArguments a, const FaultSink faults) {
  using Scan = cub::BlockScan<uint64_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ uint32_t held[kHeld];
  __shared__ int sums[3];
  __shared__ typename Scan::TempStorage storage;
  const EntryBlocks entry(a, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x), faults);
  if (entry.rows == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int blocks = static_cast<int>((int64_t{entry.tokens} + a.block_tokens - 1) / a.block_tokens);
  int32_t* chosen = a.chosen + entry.cache_head * a.room;
  if (thread == 0) a.chosen_counts[entry.cache_head] = min(blocks, a.room);
  if (blocks <= a.room) {
    for (int i = thread; i < blocks; i += kThreads) chosen[i] = i;
    return;
  }
  const int end = blocks - a.recent_blocks;
  const int wanted = a.room - a.sink_blocks - a.recent_blocks;
  for (int i = thread; i < a.sink_blocks; i += kThreads) chosen[i] = i;
  for (int i = thread; i < a.recent_blocks; i += kThreads) chosen[a.room - a.recent_blocks + i] = end + i;
  if (wanted == 0) return;
  if (thread == 0) sums[0] = 0;
  __syncthreads();
  const float* scores = a.scores + entry.first_row * a.score_token_stride + static_cast<int>(blockIdx.x) * a.score_head_stride + a.sink_blocks;
  const int count = end - a.sink_blocks;
  const Candidates candidates(scores, count, held);
  const uint32_t order = candidates.reached_by(wanted, sums);
  // Each thread has candidates that follow each other. The lower word counts those above, the upper one those of `order`.
  const int each = (count + kThreads - 1) / kThreads;
  const int first = min(thread * each, count), last = min(first + each, count);
  uint64_t own = 0;
  for (int i = first; i < last; ++i) {
    const uint32_t candidate = candidates[i];
    own += candidate > order ? 1 : candidate == order ? uint64_t{1} << 32 : 0;
  }
  uint64_t before, all;
  Scan(storage).ExclusiveSum(own, before, all);
  const int equal = wanted - static_cast<int>(static_cast<uint32_t>(all));
  int above = static_cast<int>(static_cast<uint32_t>(before)), same = static_cast<int>(before >> 32);
  for (int i = first; i < last; ++i) {
    const uint32_t candidate = candidates[i];
    if (candidate > order || (candidate == order && same < equal)) chosen[a.sink_blocks + above + min(same, equal)] = a.sink_blocks + i;
    above += candidate > order ? 1 : 0;
    same += candidate == order ? 1 : 0;
  }
}

}  // namespace

Status select_top_blocks_cuda(const SelectTopBlocksArguments& a, ExecutionContext& context) {
  const dim3 blocks(static_cast<unsigned>(a.kv_heads), static_cast<unsigned>(a.batch));
  select_blocks<<<blocks, kThreads, 0, stream_of(context)>>>(a, context.faults(describe_paged_fault));
  return launch_status();
}

}  // namespace kv
