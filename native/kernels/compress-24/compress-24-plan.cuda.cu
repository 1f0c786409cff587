// Which blocks become sparse and where they go: one thread block decides a pruning.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/compress-24/compress-24.cuda.h"
#include "kernels/cuda-elements.h"

namespace kv {
namespace {

constexpr int kThreads = 256;
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
    int equal;  // how many blocks of the threshold's loss become sparse
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

  // When every dense block becomes sparse, or none.
  __device__ void plan_whole() {
    int32_t ranks = 0;
    bool moves = false;
    int dense = 0;
    const bool valid = is_valid(dense);
    if (!valid || pruning_.count == 0) {
      stay_from(0);
    } else if (pruning_.count == dense) {
      moves = decide([](int) { return 1; });
    } else {
      ranks = 1;
    }
    if (valid) stay_from(blocks_);
    if (threadIdx.x != 0) return;
    plan_.ranks[blockIdx.x] = ranks;
    plan_.moves[blockIdx.x] = moves;
  }

  // When the losses say which.
  __device__ void plan_ranked() {
    if (plan_.ranks[blockIdx.x] == 0) return;
    find_threshold();
    const uint32_t threshold = shared_.threshold;
    const int equal = shared_.equal;
    int equal_before = 0;
    const bool moves = decide([&](int block) {
      const uint32_t loss = is_dense(block) ? plan_.losses[row_ + block] : ~0u;
      int before = 0;
      int sum = 0;
      Scan(shared_.scan).ExclusiveSum(loss == threshold, before, sum);
      __syncthreads();
      before += equal_before;
      equal_before += sum;
      return loss < threshold || (loss == threshold && before < equal) ? 1 : 0;
    });
    if (threadIdx.x == 0) plan_.moves[blockIdx.x] = moves;
  }

 private:
  __device__ void stay_from(int first) {
    for (int block = first + threadIdx.x; block < arguments_.most_blocks; block += kThreads) {
      plan_.blocks[row_ + block].to = 0;
    }
  }

  __device__ bool is_dense(int block) const { return block < blocks_ && places_[block] > 0; }

  // Whether nothing of the pruning leads outside; counts the dense blocks of its range.
  __device__ bool is_valid(int& dense) {
    const Pruning& p = pruning_;
    const int rows = arguments_.slot_count * arguments_.kv_heads;
    if (p.table_row < 0 || p.table_row >= rows) return report(FaultCode::slot_out_of_range, p.table_row, rows);
    if (p.first_block < 0 || p.end_block < p.first_block || p.end_block > arguments_.table_width ||
        blocks_ > arguments_.most_blocks || p.count < 0) {
      return report(FaultCode::pruning_out_of_range, p.table_row, arguments_.table_width);
    }
    if (p.first_id < 0 || p.first_id > arguments_.id_count - p.count) {
      return report(FaultCode::pruning_out_of_range, p.table_row, arguments_.id_count);
    }
    int found = 0;
    int freed = 0;
    int outside = 0;
    for (int block = threadIdx.x; block < blocks_; block += kThreads) {
      const int place = places_[block];
      found += place > 0;
      freed += place > p.freed_from;
      if (place > 0) outside += is_outside(place - 1, arguments_.dense_block_count);
    }
    for (int i = threadIdx.x; i < p.count; i += kThreads) {
      outside += is_outside(arguments_.ids[p.first_id + i], arguments_.sparse_block_count);
    }
    dense = sum_of(found);
    freed = sum_of(freed);
    if (sum_of(outside) > 0) return false;
    return (freed == p.count && p.count <= dense) || report(FaultCode::pruning_out_of_range, p.count, dense);
  }

  __device__ bool is_outside(int block, int blocks) {
    if (block >= 0 && block < blocks) return false;
    report_fault(faults_, FaultCode::block_out_of_range, block);
    return true;
  }

  __device__ bool report(FaultCode code, int64_t value, int64_t limit) {
    if (threadIdx.x == 0) report_fault(faults_, code, value, blockIdx.x, limit);
    return false;
  }

  // In every thread.
  __device__ int sum_of(int own) {
    const int sum = Reduce(shared_.reduce).Sum(own);
    if (threadIdx.x == 0) shared_.sum = sum;
    __syncthreads();
    const int result = shared_.sum;
    __syncthreads();
    return result;
  }

  // Finds the loss of the block of rank `count`, a byte at a time from the highest.
  __device__ void find_threshold() {
    uint32_t prefix = 0;
    int rank = pruning_.count;  // among losses that begin with the prefix
    for (int shift = 24; shift >= 0; shift -= 8) {
      shared_.histogram[threadIdx.x] = 0;
      __syncthreads();
      for (int block = threadIdx.x; block < blocks_; block += kThreads) {
        if (!is_dense(block)) continue;
        const uint32_t loss = plan_.losses[row_ + block];
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

  // Plans all blocks; chosen_block(block) says whether a dense block becomes sparse. All threads call it, for blocks in
  // ascending order. Returns whether blocks move.
  template <typename ChosenBlock>
  __device__ bool decide(const ChosenBlock& chosen_block) {
    const int freed_from = pruning_.freed_from;
    int chosen_before = 0;
    int vacated_before = 0;
    for (int first = 0; first < blocks_; first += kThreads) {
      const int block = first + threadIdx.x;
      const int chosen = chosen_block(block) != 0 && is_dense(block) ? 1 : 0;
      const int place = is_dense(block) ? places_[block] : 0;
      const int order = order_among(chosen, chosen_before);
      const int sparse = chosen ? -(arguments_.ids[pruning_.first_id + order] + 1) : 0;
      if (block < blocks_) plan_.blocks[row_ + block] = {place, sparse};
      if (chosen) places_[block] = sparse;
      const int vacates = chosen && place <= freed_from ? 1 : 0;
      const int vacated_order = order_among(vacates, vacated_before);
      if (vacates) plan_.vacated[row_ + vacated_order] = place;
    }
    if (vacated_before == 0) return false;
    __syncthreads();
    int moved_before = 0;
    for (int first = 0; first < blocks_; first += kThreads) {
      const int block = first + threadIdx.x;
      const int moves = is_dense(block) && places_[block] > freed_from ? 1 : 0;
      const int order = order_among(moves, moved_before);
      if (moves) places_[block] = plan_.blocks[row_ + block].to = plan_.vacated[row_ + order];
    }
    return true;
  }

  // How many threads before this one, in this step or in steps before, are marked.
  __device__ int order_among(int marked, int& marked_before) {
    int before = 0;
    int sum = 0;
    Scan(shared_.scan).ExclusiveSum(marked, before, sum);
    __syncthreads();
    before += marked_before;
    marked_before += sum;
    return before;
  }

  const Compress24Arguments& arguments_;
  const PruningPlan& plan_;
  const FaultSink faults_;
  Shared& shared_;
  const Pruning pruning_;
  int32_t* const places_;  // of the range
  const int64_t row_;      // of the plan
  const int blocks_;
};

__global__ void __launch_bounds__(kThreads) plan_whole_kernel(const __grid_constant__ Parameters parameters) {
  __shared__ PruningOfBlock::Shared shared;
  PruningOfBlock(parameters, shared).plan_whole();
}

__global__ void __launch_bounds__(kThreads) plan_ranked_kernel(const __grid_constant__ Parameters parameters) {
  __shared__ PruningOfBlock::Shared shared;
  PruningOfBlock(parameters, shared).plan_ranked();
}

int64_t planned_blocks(const Compress24Arguments& arguments) {
  return int64_t{arguments.pruning_count} * arguments.most_blocks;
}

}  // namespace

size_t pruning_plan_bytes(const Compress24Arguments& arguments) {
  return static_cast<size_t>(4 * planned_blocks(arguments) + 2 * int64_t{arguments.pruning_count}) * sizeof(int32_t);
}

PruningPlan pruning_plan(const Compress24Arguments& arguments, void* memory) {
  PruningPlan plan;
  plan.blocks = static_cast<BlockMove*>(memory);
  plan.vacated = reinterpret_cast<int32_t*>(plan.blocks + planned_blocks(arguments));
  plan.losses = reinterpret_cast<uint32_t*>(plan.vacated + planned_blocks(arguments));
  plan.ranks = reinterpret_cast<int32_t*>(plan.losses + planned_blocks(arguments));
  plan.moves = plan.ranks + arguments.pruning_count;
  return plan;
}

Status plan_whole_prunings(const Compress24Arguments& arguments, const PruningPlan& plan, FaultSink faults,
                           cudaStream_t stream) {
  plan_whole_kernel<<<static_cast<unsigned>(arguments.pruning_count), kThreads, 0, stream>>>({arguments, plan, faults});
  return launch_status();
}

Status plan_ranked_prunings(const Compress24Arguments& arguments, const PruningPlan& plan, cudaStream_t stream) {
  plan_ranked_kernel<<<static_cast<unsigned>(arguments.pruning_count), kThreads, 0, stream>>>({arguments, plan, {}});
  return launch_status();
}

}  // namespace kv
