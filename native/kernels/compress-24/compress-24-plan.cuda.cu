// Decides which blocks become sparse and where they go. The thread blocks of a pruning share the computation of
// losses. If losses decide, the last thread block that finishes its share makes the plan. Otherwise the first thread
// block makes it at once.
#include <algorithm>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/compress-24/compress-24-group.cuda.h"
#include "kernels/compress-24/compress-24.cuda.h"
#include "shared/cuda/arrivals.cuda.h"
#include "shared/cuda/elements.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;
constexpr int kLaunchedBlocks = 512;  // about as many thread blocks as run at the same time
constexpr int kMostShares = 64;        // thread blocks of one pruning

using Reduce = cub::BlockReduce<int, kThreads>;
using Scan = cub::BlockScan<int, kThreads>;

struct Parameters {
  Compress24Arguments arguments;
  PruningPlan plan;
  FaultSink faults;
};

class PruningOfBlock {
 public:
  struct Shared {
    union {
      typename Reduce::TempStorage reduce;
      typename Scan::TempStorage scan;
    };
    int sum;
    int histogram[256];
    uint32_t threshold;
    int equal;  // how many of the blocks with the threshold as their loss become sparse
    bool last;
  };

  __device__ PruningOfBlock(const Parameters& parameters, Shared& shared)
      : arguments_(parameters.arguments),
        plan_(parameters.plan),
        faults_(parameters.faults),
        shared_(shared),
        pruning_(parameters.arguments.prunings[blockIdx.x]),
        places_(parameters.arguments.table + int64_t{pruning_.table_row} * parameters.arguments.table_width +
                pruning_.first_block),
        row_(int64_t{blockIdx.x} * parameters.arguments.most_blocks),
        blocks_(pruning_.end_block - pruning_.first_block) {}

  template <typename Element>
  __device__ void plan() {
    // Another thread block may already be changing the map while this one counts. But entries turn negative only if
    // every dense block becomes sparse, or after all losses are computed. A wrong count can therefore not lead to
    // computing losses.
    const int dense = has_range() ? count_dense() : 0;
    if (pruning_.count > 0 && pruning_.count < dense && arguments_.block_loss == nullptr) {
      compute_losses<Element>();
      if (!arrives_last()) return;
    } else if (blockIdx.y != 0) {
      return;
    }
    if (!is_valid(dense) || pruning_.count == 0) return stay_from(0);
    if (pruning_.count == dense) {
      decide([](int) { return true; });
    } else {
      if (arguments_.block_loss != nullptr) take_given_losses();
      decide_by_losses();
    }
    stay_from(blocks_);
  }

 private:
  // ---- Checks of the pruning. ----

  __device__ bool stands_dense(int block) const { return block < blocks_ && is_dense(places_[block]); }

  __device__ bool has_row() const {
    return pruning_.table_row >= 0 && pruning_.table_row < int64_t{arguments_.slot_count} * arguments_.kv_heads;
  }
  __device__ bool has_range() const {
    return has_row() && pruning_.first_block >= 0 && blocks_ >= 0 && pruning_.end_block <= arguments_.table_width &&
           blocks_ <= arguments_.most_blocks;
  }

  __device__ int count_dense() {
    int dense = 0;
    for (int block = threadIdx.x; block < blocks_; block += kThreads) dense += is_dense(places_[block]);
    return sum_of(dense);
  }

  // Whether all numbers of the pruning are in range.
  __device__ bool is_valid(int dense) {
    const Pruning& p = pruning_;
    if (!has_row()) {
      return report(Compress24Fault::row_out_of_range, p.table_row,
                    int64_t{arguments_.slot_count} * arguments_.kv_heads);
    }
    if (!has_range() || p.count < 0) {
      return report(Compress24Fault::pruning_out_of_range, p.table_row, arguments_.table_width);
    }
    if (p.first_id < 0 || p.first_id > arguments_.id_count - p.count) {
      return report(Compress24Fault::pruning_out_of_range, p.table_row, arguments_.id_count);
    }
    int freed = 0;
    bool outside = false;
    for (int block = threadIdx.x; block < blocks_; block += kThreads) {
      const int place = places_[block];
      freed += is_dense(place) && place >= p.freed_from;
      outside |= is_dense(place) && is_outside(place, arguments_.dense_block_count);
    }
    for (int i = threadIdx.x; i < p.count; i += kThreads) {
      outside |= is_outside(arguments_.ids[p.first_id + i], arguments_.sparse_block_count);
    }
    if (__syncthreads_or(outside)) return false;
    return (sum_of(freed) == p.count && p.count <= dense) ||
           report(Compress24Fault::pruning_out_of_range, p.count, dense);
  }

  __device__ bool is_outside(int block, int blocks) {
    if (block >= 0 && block < blocks) return false;
    report_fault(faults_, PagedFault::block_out_of_range, block);
    return true;
  }

  __device__ bool report(Compress24Fault code, int64_t value, int64_t limit) {
    if (threadIdx.x == 0) report_fault(faults_, code, value, blockIdx.x, limit);
    return false;
  }

  // The sum over the thread block. Every thread gets it.
  __device__ int sum_of(int own) {
    const int sum = Reduce(shared_.reduce).Sum(own);
    if (threadIdx.x == 0) shared_.sum = sum;
    __syncthreads();
    const int result = shared_.sum;
    __syncthreads();
    return result;
  }

  // ---- Losses. ----

  // Computes the losses of this thread block's share of the range.
  template <typename Element>
  __device__ void compute_losses() {
    const uint8_t* mask = arguments_.element_mask != nullptr ? mask_of(arguments_, pruning_) : nullptr;
    for (int block = blockIdx.y; block < blocks_; block += gridDim.y) {
      const int place = places_[block];
      if (!names_dense(place, arguments_.dense_block_count)) continue;
      const float loss = block_sum(loss_of<Element>(dense_block(arguments_, place), mask));
      if (threadIdx.x == 0) plan_.losses[row_ + block] = __float_as_uint(loss) & 0x7fffffffu;
    }
  }

  // Takes the given losses of the whole range.
  __device__ void take_given_losses() {
    const float* given = arguments_.block_loss + (places_ - arguments_.table);
    for (int block = threadIdx.x; block < blocks_; block += kThreads) {
      plan_.losses[row_ + block] = rank_of_given_loss(given[block], __float_as_uint(given[block]));
    }
    __syncthreads();
  }

  // This thread's share of a block's loss. It covers some tiles of four tokens and eight dims.
  template <typename Element>
  __device__ float loss_of(const uint16_t* dense, const uint8_t* mask) const {
    const bool keys = arguments_.operand == KvOperand::keys;
    const int chunks = arguments_.head_dim / 8;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < kBlock24Tokens / 4 * chunks; i += kThreads) {
      const int at = i / chunks * 4 * arguments_.head_dim + i % chunks * 8;
      uint4 rows[4];
      uint2 masks[4];
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        rows[row] = *reinterpret_cast<const uint4*>(dense + at + row * arguments_.head_dim);
        if (mask != nullptr) masks[row] = *reinterpret_cast<const uint2*>(mask + at + row * arguments_.head_dim);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const GroupPair pair = keys ? key_pair(rows[j]) : value_pair(rows, j);
        const PairMasks kept = mask == nullptr ? largest_two(pair) : keys ? key_mask(masks[j]) : value_mask(masks, j);
        sum += lost<Element>(pair, kept);
      }
    }
    return sum;
  }

  // Whether all shares of the losses are computed.
  __device__ bool arrives_last() {
    if (threadIdx.x == 0) shared_.last = kv::arrives_last(plan_.arrivals[blockIdx.x], gridDim.y);
    __syncthreads();
    return shared_.last;
  }

  __device__ uint32_t loss_at(int block) const { return __ldcg(plan_.losses + row_ + block); }

  // Finds the loss of the block of rank `count`, one byte at a time from the highest.
  __device__ void find_threshold() {
    uint32_t prefix = 0;
    int rank = pruning_.count;  // among losses that begin with `prefix`
    for (int shift = 24; shift >= 0; shift -= 8) {
      shared_.histogram[threadIdx.x] = 0;
      __syncthreads();
      for (int block = threadIdx.x; block < blocks_; block += kThreads) {
        if (!stands_dense(block)) continue;
        const uint32_t loss = loss_at(block);
        if (shift == 24 || loss >> (shift + 8) == prefix) atomicAdd(&shared_.histogram[loss >> shift & 255u], 1);
      }
      __syncthreads();
      const int own = shared_.histogram[threadIdx.x];
      int before = 0;
      Scan(shared_.scan).ExclusiveSum(own, before);
      if (before < rank && rank <= before + own) {
        shared_.threshold = prefix << 8 | threadIdx.x;
        shared_.equal = rank - before;
      }
      __syncthreads();
      prefix = shared_.threshold;
      rank = shared_.equal;
    }
  }

  // ---- The plan. ----

  __device__ void stay_from(int first) {
    for (int block = first + threadIdx.x; block < arguments_.most_blocks; block += kThreads) {
      plan_.blocks[row_ + block] = BlockPlan{};
    }
  }

  __device__ void decide_by_losses() {
    find_threshold();
    const uint32_t threshold = shared_.threshold;
    const int equal = shared_.equal;
    int equal_before = 0;
    decide([&](int block) {
      const uint32_t loss = stands_dense(block) ? loss_at(block) : ~0u;
      int before = 0;
      int sum = 0;
      Scan(shared_.scan).ExclusiveSum(loss == threshold, before, sum);
      __syncthreads();
      before += equal_before;
      equal_before += sum;
      return loss < threshold || (loss == threshold && before < equal);
    });
  }

  // Makes the plan of all blocks. becomes_sparse(block) says which dense blocks become sparse. All threads call it,
  // for blocks in ascending order.
  template <typename BecomesSparse>
  __device__ void decide(const BecomesSparse& becomes_sparse) {
    int sparse_before = 0;
    int vacated_before = 0;
    for (int first = 0; first < blocks_; first += kThreads) {
      const int block = first + threadIdx.x;
      const bool becomes = becomes_sparse(block) && stands_dense(block);
      const int place = becomes ? places_[block] : -1;
      const bool vacates = becomes && place < pruning_.freed_from;
      // One scan counts both, in half a word each: a step has few blocks.
      int before = 0;
      int sum = 0;
      Scan(shared_.scan).ExclusiveSum(static_cast<int>(becomes) | static_cast<int>(vacates) << 16, before, sum);
      __syncthreads();
      BlockPlan plan;
      if (becomes) {
        const int32_t id = arguments_.ids[pruning_.first_id + sparse_before + (before & 0xffff)];
        plan = {place, block_entry(BlockKind::sparse_24, id), -1};
        places_[block] = plan.sparse;
      }
      if (block < blocks_) plan_.blocks[row_ + block] = plan;
      if (vacates) plan_.vacated[row_ + vacated_before + (before >> 16)] = block;
      sparse_before += sum & 0xffff;
      vacated_before += sum >> 16;
    }
    if (vacated_before > 0) fill_vacated();
  }

  // The n-th block that stays dense and has a place at or above freed_from moves to the n-th vacated place below
  // freed_from.
  __device__ void fill_vacated() {
    __syncthreads();
    int moved_before = 0;
    for (int first = 0; first < blocks_; first += kThreads) {
      const int block = first + threadIdx.x;
      const bool moves = stands_dense(block) && places_[block] >= pruning_.freed_from;
      int before = 0;
      int sum = 0;
      Scan(shared_.scan).ExclusiveSum(static_cast<int>(moves), before, sum);
      __syncthreads();
      if (moves) {
        BlockPlan& vacated = plan_.blocks[row_ + plan_.vacated[row_ + moved_before + before]];
        vacated.refill = places_[block];
        places_[block] = vacated.dense;
      }
      moved_before += sum;
    }
  }

  const Compress24Arguments& arguments_;
  const PruningPlan& plan_;
  const FaultSink faults_;
  Shared& shared_;
  const Pruning pruning_;
  int32_t* const places_;  // the entries of the range
  const int64_t row_;      // where the range begins in the plan
  const int blocks_;
};

template <typename Element>
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ Parameters parameters) {
  __shared__ PruningOfBlock::Shared shared;
  ptx::follow_previous_kernel();
  PruningOfBlock(parameters, shared).plan<Element>();
}

}  // namespace

size_t pruning_counter_bytes(const Compress24Arguments& arguments) {
  return static_cast<size_t>(arguments.pruning_count) * sizeof(unsigned);
}

size_t pruning_plan_bytes(const Compress24Arguments& arguments) {
  return static_cast<size_t>(planned_blocks(arguments)) * (sizeof(BlockPlan) + sizeof(int32_t) + sizeof(uint32_t));
}

PruningPlan pruning_plan(const Compress24Arguments& arguments, void* counters, void* workspace) {
  PruningPlan plan;
  plan.blocks = static_cast<BlockPlan*>(workspace);
  plan.vacated = reinterpret_cast<int32_t*>(plan.blocks + planned_blocks(arguments));
  plan.losses = reinterpret_cast<uint32_t*>(plan.vacated + planned_blocks(arguments));
  plan.arrivals = static_cast<unsigned*>(counters);
  return plan;
}

Status plan_prunings(const Compress24Arguments& arguments, const PruningPlan& plan, FaultSink faults,
                     cudaStream_t stream) {
  const int most_shares = std::min(kMostShares, arguments.most_blocks);
  const int shares = std::clamp(kLaunchedBlocks / arguments.pruning_count, 1, most_shares);
  const auto kernel = arguments.dtype == DType::f16 ? plan_kernel<__half> : plan_kernel<__nv_bfloat16>;
  return launch_overlapped(kernel, dim3(arguments.pruning_count, shares), kThreads, 0, stream,
                           Parameters{arguments, plan, faults});
}

}  // namespace kv
