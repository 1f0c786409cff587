// Decode attention over 2:4 blocks by one thread block. All its warps except the last are streaming warps: they take
// blocks in turn and compute independently. The last warp plans what they take, and merges their partials of a split.
// Partials of warps, and then of splits, are merged in f32, as in decode attention. Device code.
#pragma once

#include <cstdint>

#include "kernels/decode-attention-24/decode-attention-24-schedule.cuda.h"
#include "kernels/decode-attention-24/decode-attention-24-plan.cuda.h"
#include "kernels/decode-attention-24/decode-attention-24-stream.cuda.h"
#include "ptx/dependent-launch.cuda.h"
#include "shared/attention/decode/merge-partials.cuda.h"
#include "shared/cuda/arrivals.cuda.h"

namespace kv {

template <typename Element, int kHeadDim, int kColumnTiles, typename Copies>
class DecodeBlock24 {
 public:
  static constexpr int kRows = 8 * kColumnTiles;
  static constexpr int kWarps = Copies::kWarps;  // streaming warps
  static constexpr int kThreads = 32 * (kWarps + 1);
  using Parameters = DecodeParameters24<typename Copies::Maps>;
  using WorkList = WorkList24<kThreads, kRows>;
  using Planner = Planner24<Parameters, kWarps, WorkList>;
  using Stream = WarpStream24<Element, kHeadDim, Copies>;
  using Attention = DecodeWarp24<Element, kHeadDim, kColumnTiles>;
  using Partial = DecodePartial<kRows, kHeadDim>;

  // The most entries whose last split a thread block may compute. Each work tile may complete two entries. A thread
  // block therefore stops taking small work tiles before there could be more; the other thread blocks take them.
  static constexpr int kMostFinished = 32;

  struct Shared {
    typename Stream::Ring rings[kWarps];
    Partial partials[kWarps];
    StageRing<1> partials_ring;  // each streaming warp writes one partial, of the same split
    Plan24 plan;
    typename WorkList::Shared work_list;
    Split24 last;  // the last split of this thread block, if it has any
    bool has_last;
    Split24 finished[kMostFinished];
    int finished_count;
  };

  static __device__ void run(const Parameters& parameters, Shared& shared) {
    if (threadIdx.x == 0) {
      shared.partials_ring.init(32, 32 * kWarps);
      shared.plan.ring.init(32 * kWarps, 32);
    }
    const bool plans = threadIdx.x / 32 == kWarps;
    auto& ring = shared.rings[plans ? 0 : threadIdx.x / 32];
    Copies copies(parameters, ring.copies, !plans && threadIdx.x % 32 == 0);
    ptx::let_next_kernel_start();
    WorkList work_list(parameters.arguments, shared.work_list);
    Planner planner(parameters, work_list, shared.plan);
    const bool prepared = work_list.build_early();
    if (prepared && plans) planner.prepare();
    ptx::wait_for_previous_kernel();
    if (prepared && plans) planner.look_up();
    if (!work_list.build(parameters.faults)) return;
    DecodeBlock24 block(parameters, shared, work_list);
    if (plans) {
      planner.begin();
      block.plan(planner);
    } else {
      Stream stream(parameters.arguments, shared.plan, copies, ring);
      block.stream(stream);
    }
    __syncthreads();
    if (shared.has_last) block.merge_last();
    for (int i = 0; i < shared.finished_count; ++i) block.merge_splits(shared.finished[i]);
  }

 private:
  // Which part of a block the next piece holds. Sparse blocks come whole, so they have no second half.
  enum class Part { keys, second_keys, values, second_values };

  __device__ DecodeBlock24(const Parameters& parameters, Shared& shared, const WorkList& work_list)
      : parameters_(parameters),
        arguments_(parameters.arguments),
        shared_(shared),
        work_list_(work_list),
        partials_(static_cast<Partial*>(parameters.partials)) {}

  __device__ const typename WorkList::Entries& entries() const { return work_list_.entries(); }
  __device__ Partial& partial_of(int warp) const { return shared_.partials[warp]; }

  // ---- The last warp. ----

  __device__ void plan(Planner& planner) {
    RingPosition<1> left;
    Plan24::Position oldest;
    int finished = 0;
    int planned = 0;
    // The last range of blocks, and the mark that no work is left, stay in the plan.
    for (bool more = true; more || planned > 2;) {
      if (more && planned < Plan24::kDepth) {
        more = planner.add(finished < kMostFinished - 2 * Plan24::kDepth);
        if (!more && threadIdx.x % 32 == 0) parameters_.tickets->finish();
        ++planned;
        continue;
      }
      const BlockRange24& range = shared_.plan.ranges[oldest.stage];
      if (range.ends) {
        shared_.partials_ring.wait_full(left);
        const Split24 split = range.split;
        merge_warps_of(split, range.rows, threadIdx.x % 32, 32, destination_of(split));
        __syncwarp();
        shared_.partials_ring.release_by_thread(left);
        left.advance();
        if (threadIdx.x % 32 == 0 && completes_entry(split)) shared_.finished[finished++] = split;
        finished = __shfl_sync(0xffffffffu, finished, 0);
      }
      oldest.advance();
      --planned;
    }
    if (threadIdx.x % 32 != 0) return;
    shared_.finished_count = finished;
    shared_.has_last = planned == 2;
    if (shared_.has_last) shared_.last = shared_.plan.ranges[oldest.stage].split;
  }

  // Counts a split whose partial is written. Returns whether all splits of its entry are written.
  __device__ bool completes_entry(const Split24& split) {
    return split.count > 1 && arrives_last(parameters_.arrivals[split.entry.index], static_cast<unsigned>(split.count));
  }

  // Where the split's result goes. Null if the split is the whole entry: its result is then the output.
  __device__ Partial* destination_of(const Split24& split) const {
    return split.count > 1 ? &partials_[split.number] : nullptr;
  }

  // Merges the last split of the thread block. No warp streams any more, so all threads call it.
  __device__ void merge_last() {
    const Split24& split = shared_.last;
    merge_warps_of(split, entries().rows(split.head, split.entry), threadIdx.x, kThreads, destination_of(split));
    __syncthreads();
    if (threadIdx.x == 0 && completes_entry(split)) shared_.finished[shared_.finished_count++] = split;
    __syncthreads();
  }

  // Merges the warps' partials into `partial`. If that is null, writes the outputs.
  __device__ void merge_warps_of(const Split24& split, int rows, int thread, int threads, Partial* partial) {
    merge_partials(shared_.partials, kWarps, rows, thread, threads, [&](const MergedPartial& merged, int row, int dim) {
      if (partial != nullptr) {
        merged.write(*partial, row, dim);
      } else {
        write_output(split, merged, row, dim);
      }
    });
  }

  __device__ void write_output(const Split24& split, const MergedPartial& merged, int row, int dim) {
    write_row<Element>(arguments_, entries().token(split.head, split.entry, row), entries().query_head(split.entry, row),
                       merged, dim);
  }

  // Merges all splits of an entry and writes the outputs. All their partials must be written. All threads of the
  // block call it.
  __device__ void merge_splits(const Split24& split) {
    merge_partials(&partials_[split.first_number], split.count, entries().rows(split.head, split.entry), threadIdx.x,
                   kThreads, [&](const MergedPartial& merged, int row, int dim) { write_output(split, merged, row, dim); });
  }

  // ---- The streaming warps. ----

  __device__ void stream(Stream& stream) {
    Attention attention(arguments_.scale);
    Plan24::Position at;
    RingPosition<1> leaving;
    const BlockRange24* range = nullptr;
    int block = 0;
    int blocks = 0;
    Part part = Part::keys;
    // Each step is in the code only once: the code is long, and fetching instructions from memory takes time.
    for (;;) {
      stream.fill();
      if (block < blocks) {
        attend(*range, block, part, stream, attention);
        if (part == Part::keys) block += kWarps;
        continue;
      }
      if (range != nullptr) {
        if (range->ends) {
          shared_.partials_ring.wait_empty(leaving);
          leave_partial(attention);
          shared_.partials_ring.fill_by_thread(leaving);
          leaving.advance();
        }
        shared_.plan.ring.release_by_thread(at);
        at.advance();
      }
      shared_.plan.ring.wait_full(at);
      range = &shared_.plan.ranges[at.stage];
      if (range->nothing) return;
      blocks = range->blocks;
      block = range->template first_of_warp<kWarps>();
      if (!range->begins) continue;
      attention.clear();
      set_rows(*range, attention);
    }
  }

  // Rows beyond the pack are zeros, and their results are not written.
  __device__ void set_rows(const BlockRange24& range, Attention& attention) {
    const Split24& split = range.split;
    const int lane = threadIdx.x % 32;
    const int rows = range.rows;
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const int row = 8 * tile + lane / 4;
      attention.set_query(tile, row < rows ? static_cast<const Element*>(arguments_.query) +
                                                 entries().token(split.head, split.entry, row) *
                                                     arguments_.query_token_stride +
                                                 entries().query_head(split.entry, row) *
                                                     arguments_.query_head_stride
                                           : nullptr);
    }
#pragma unroll
    for (int column = 0; column < 2 * kColumnTiles; ++column) {
      const int row = row_of(column);
      attention.set_visible_keys(column, row < rows ? entries().visible_keys(split.head, split.entry, row) : 0);
    }
  }

  // Computes the next piece of a block, and sets `part` to the part that follows.
  __device__ void attend(const BlockRange24& range, int block, Part& part, Stream& stream, Attention& attention) {
    auto& piece = stream.take();
    const int first_key = (range.first_block + block) * kBlock24Tokens;
    if (part == Part::keys || part == Part::second_keys) {
      if (stream.sparse()) {
        attention.score_sparse(piece.sparse_keys);
      } else if (part == Part::keys) {
        attention.template score_dense<0>(piece.dense_half);
        part = Part::second_keys;
        return;
      } else {
        attention.template score_dense<1>(piece.dense_half);
      }
      attention.weigh(first_key, first_key + kBlock24Tokens > range.fewest_visible);
      part = Part::values;
      return;
    }
    if (stream.sparse()) {
      attention.add_sparse(piece.sparse_values);
      part = Part::keys;
      return;
    }
    const int first_value = first_key + (part == Part::values ? 0 : kHalfBlock24Tokens);
    clear_rows(piece.dense_half, range.split.head.keys - first_value, stream);
    if (part == Part::values) {
      attention.template add_dense<0>(piece.dense_half);
      part = Part::second_values;
    } else {
      attention.template add_dense<1>(piece.dense_half);
      part = Part::keys;
    }
  }

  // A block may hold anything after the sequence's last value. Zero times NaN is not zero, so these rows are cleared.
  __device__ void clear_rows(Panels24<Element, kHeadDim>& values, int first_row, Stream& stream) {
    if (first_row >= kHalfBlock24Tokens) return;
    const int lane = threadIdx.x % 32;
    for (int row = max(0, first_row); row < kHalfBlock24Tokens; ++row) {
      for (auto& panel : values.panels) reinterpret_cast<uint32_t*>(panel[row])[lane] = 0;
    }
    stream.release_writes();
    __syncwarp();
  }

  __device__ void leave_partial(Attention& attention) {
    attention.finish();
    const int lane = threadIdx.x % 32;
    Partial& partial = partial_of(threadIdx.x / 32);
#pragma unroll
    for (int column = 0; column < 2 * kColumnTiles; ++column) {
      const int row = row_of(column);
      if (lane / 4 == 0) {
        partial.reference[row] = attention.softmax().reference(column);
        partial.sum[row] = attention.softmax().sum(column);
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        partial.output[row][8 * i + lane / 4] = attention.output(i / 2, i % 2, column);
      }
    }
  }

  // The row of the pack that one of this thread's columns belongs to.
  static __device__ int row_of(int column) { return column / 2 * 8 + threadIdx.x % 4 * 2 + column % 2; }

  const Parameters& parameters_;
  const Attention24Arguments& arguments_;
  Shared& shared_;
  const WorkList& work_list_;
  Partial* const partials_;
};

template <typename Element, int kHeadDim, int kColumnTiles, typename Copies>
__global__ void __launch_bounds__(32 * (Copies::kWarps + 1), 1)
    decode_24_kernel(const __grid_constant__ DecodeParameters24<typename Copies::Maps> parameters) {
  using Block = DecodeBlock24<Element, kHeadDim, kColumnTiles, Copies>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Block::run(parameters, *reinterpret_cast<typename Block::Shared*>(shared_memory));
}

}  // namespace kv
