// Mixed decode attention by one thread block: it takes segment after segment of blocks, and its warps every kWarps-th
// block of a segment, each on its own. The partial outputs of warps, then of segments, are merged in f32 as decode
// attention's. Device code.
#pragma once

#include <cstdint>

#include "kernels/decode-attention/decode-attention-merge.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention-line.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention-stream.h"
#include "ptx/dependent-launch.h"

namespace kv {

template <typename Maps>
struct MixedDecodeParameters {
  MixedAttentionArguments arguments;
  MixedTickets::Counters* tickets;
  unsigned* arrivals;
  void* partials;  // [segment]
  Maps maps;
};

template <typename Element, int kHeadDim, int kColumnTiles, typename Copies>
class MixedDecodeBlock {
 public:
  static constexpr int kRows = 8 * kColumnTiles;
  static constexpr int kWarps = Copies::kWarps;
  using Parameters = MixedDecodeParameters<typename Copies::Maps>;
  using Line = MixedLine<32 * kWarps, kRows>;
  using Stream = MixedWarpStream<Element, kHeadDim, kWarps, Copies, MixedTurns<Line>>;
  using Attention = MixedWarpAttention<Element, kHeadDim, kColumnTiles>;
  using Partial = DecodePartial<kRows, kHeadDim>;
  static_assert(sizeof(Partial) <= sizeof(typename Stream::Piece));

  struct Shared {
    typename Stream::Ring rings[kWarps];
    typename Line::Shared line;
    int partial_piece[kWarps];  // which piece of its ring holds a warp's partial
    int next_run;
    bool finishes_entry;
  };

  static __device__ void run(const Parameters& parameters, Shared& shared) {
    auto& ring = shared.rings[threadIdx.x / 32];
    Copies copies(parameters, ring.copies);
    ptx::follow_previous_kernel();
    MixedTickets tickets(*parameters.tickets, shared.next_run);
    if (threadIdx.x == 0) tickets.forget();
    const Line line(parameters.arguments, shared.line);
    const MixedRuns runs(line.blocks(), gridDim.x, kWarps);
    Stream stream(parameters, {line, runs, tickets}, copies, ring);
    MixedDecodeBlock(parameters, shared, line, tickets, stream).work();
    if (threadIdx.x == 0) tickets.finish();
  }

 private:
  // What the next piece of a block is. Sparse blocks have no second halves.
  enum class Part { keys, second_keys, values, second_values };

  __device__ MixedDecodeBlock(const Parameters& parameters, Shared& shared, const Line& line, MixedTickets& tickets,
                              Stream& stream)
      : arguments_(parameters.arguments),
        shared_(shared),
        line_(line),
        tickets_(tickets),
        stream_(stream),
        arrivals_(parameters.arrivals),
        partials_(static_cast<Partial*>(parameters.partials)) {}

  __device__ void work() {
    MixedSegment segment;
    MixedSegment before;
    Attention attention(arguments_.scale);
    int block = 0;
    Part part = Part::keys;
    bool more = true;
    // Every step is in one place: the code is long, and instructions that come from memory take their time.
    for (;;) {
      const bool ends = block >= segment.end_block;
      stream_.fill(ends ? Stream::kSlots - 1 : Stream::kSlots);
      if (!ends) {
        attend(segment, block, part, attention);
        if (part == Part::keys) block += kWarps;
        continue;
      }
      leave_partial(attention);
      const bool last = !more;
      MixedSegment next;
      more = stream_.next_segment(next);
      block = next.first_block + threadIdx.x / 32;
      attention.clear();
      if (more) set_rows(next.entry, attention);
      settle(segment, before);
      if (last) break;
      before = segment;
      segment = next;
    }
  }

  // Merges the partials of the segment's warps into its own, or into outputs. Whether the segment before was the last
  // of its entry to come has become known since: then the entry's partials are merged too. While one thread asks, the
  // others go on. A segment of count 0 is none.
  __device__ void settle(const MixedSegment& segment, const MixedSegment& before) {
    __syncthreads();
    if (threadIdx.x == 0) tickets_.forget();
    if (segment.count > 0) merge_warps_of(segment.entry, segment.count > 1 ? &partials_[segment.number] : nullptr);
    if (before.count > 1 && shared_.finishes_entry) {
      __syncthreads();
      merge_blocks<kWarps>(&partials_[before.first_number], before.count, line_.rows(before.entry),
                           partial_of(threadIdx.x / 32));
      __syncthreads();
      merge_warps_of(before.entry, nullptr);
    }
    stream_.release_writes();
    __syncthreads();  // the partials give way to the rings
    if (threadIdx.x == 0 && segment.count > 1) shared_.finishes_entry = arrive(segment);
  }

  // Into a partial of the entry or, without one, its outputs.
  __device__ void merge_warps_of(const DecodeEntry& entry, Partial* partial) {
    const auto use = [&](const MergedPartial& merged, int row, int dim) {
      if (partial != nullptr) {
        merged.write(*partial, row, dim);
        return;
      }
      write_row<Element>(arguments_, line_, entry, merged, row, dim);
    };
    merge_warps<kWarps, kHeadDim>(line_.rows(entry), [this](int warp) -> Partial& { return partial_of(warp); }, use);
  }

  __device__ bool arrive(const MixedSegment& segment) {
    __threadfence();
    if (atomicAdd(&arrivals_[segment.entry.index], 1u) + 1 < static_cast<unsigned>(segment.count)) return false;
    arrivals_[segment.entry.index] = 0;
    __threadfence();
    return true;
  }

  __device__ Partial& partial_of(int warp) const {
    return reinterpret_cast<Partial&>(shared_.rings[warp].pieces[shared_.partial_piece[warp]]);
  }

  // Rows past the pack's are zeros; their results are not written.
  __device__ void set_rows(const DecodeEntry& entry, Attention& attention) {
    const int lane = threadIdx.x % 32;
    const int rows = line_.rows(entry);
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const int row = 8 * tile + lane / 4;
      attention.set_query(tile, row < rows ? static_cast<const Element*>(arguments_.query) +
                                                 line_.token(entry, row) * arguments_.query_token_stride +
                                                 line_.query_head(entry, row) * arguments_.query_head_stride
                                           : nullptr);
    }
#pragma unroll
    for (int column = 0; column < 2 * kColumnTiles; ++column) {
      const int row = row_of(column);
      attention.set_visible_keys(column, row < rows ? line_.visible_keys(entry, row) : 0);
    }
  }

  // Takes the next piece of a block into account, and sets which part of a block comes then.
  __device__ void attend(const MixedSegment& segment, int block, Part& part, Attention& attention) {
    auto& piece = stream_.take();
    const int first_key = block * kMixedBlockTokens;
    if (part == Part::keys || part == Part::second_keys) {
      if (stream_.sparse()) {
        attention.score_sparse(piece.sparse_keys);
      } else if (part == Part::keys) {
        attention.template score_dense<0>(piece.dense_half);
        part = Part::second_keys;
        return;
      } else {
        attention.template score_dense<1>(piece.dense_half);
      }
      attention.weigh(first_key, first_key + kMixedBlockTokens > line_.visible_keys(segment.entry, 0));
      part = Part::values;
      return;
    }
    if (stream_.sparse()) {
      attention.add_sparse(piece.sparse_values);
      part = Part::keys;
      return;
    }
    const int first_value = first_key + (part == Part::values ? 0 : kMixedHalfTokens);
    clear_rows(piece.dense_half, line_.key_count(segment.entry.cache_head) - first_value);
    if (part == Part::values) {
      attention.template add_dense<0>(piece.dense_half);
      part = Part::second_values;
    } else {
      attention.template add_dense<1>(piece.dense_half);
      part = Part::keys;
    }
  }

  // Behind a sequence's last value a block may hold anything, which times a weight of zero need not be zero.
  __device__ void clear_rows(MixedPanels<Element, kHeadDim>& values, int first_row) {
    if (first_row >= kMixedHalfTokens) return;
    const int lane = threadIdx.x % 32;
    for (int row = max(0, first_row); row < kMixedHalfTokens; ++row) {
      for (auto& panel : values.panels) reinterpret_cast<uint32_t*>(panel[row])[lane] = 0;
    }
    stream_.release_writes();
    __syncwarp();
  }

  __device__ void leave_partial(Attention& attention) {
    attention.finish();
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (lane == 0) shared_.partial_piece[warp] = stream_.free_piece();
    __syncwarp();
    Partial& partial = partial_of(warp);
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

  // Of this thread's columns.
  static __device__ int row_of(int column) { return column / 2 * 8 + threadIdx.x % 4 * 2 + column % 2; }

  const MixedAttentionArguments& arguments_;
  Shared& shared_;
  const Line& line_;
  MixedTickets& tickets_;
  Stream& stream_;
  unsigned* const arrivals_;
  Partial* const partials_;
};

template <typename Element, int kHeadDim, int kColumnTiles, typename Copies>
__global__ void __launch_bounds__(32 * Copies::kWarps, 1)
    mixed_decode_kernel(const __grid_constant__ MixedDecodeParameters<typename Copies::Maps> parameters) {
  using Block = MixedDecodeBlock<Element, kHeadDim, kColumnTiles, Copies>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Block::run(parameters, *reinterpret_cast<typename Block::Shared*>(shared_memory));
}

}  // namespace kv
