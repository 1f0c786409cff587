// Mixed decode attention by one thread block: it takes chunk after chunk of blocks, and its warps every kWarps-th block
// of a chunk, each on its own. The partial outputs of warps, then of chunks, are merged in f32 as decode attention's.
// Device code.
#pragma once

#include <cstdint>

#include "kernels/decode-attention/decode-attention-merge.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention-chunks.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention-stream.h"

namespace kv {

template <typename Maps>
struct MixedDecodeParameters {
  MixedAttentionArguments arguments;
  MixedTickets::Counters* tickets;
  unsigned* arrivals;
  void* partials;
  Maps maps;
};

template <typename Element, int kHeadDim, int kColumnTiles, typename Copies>
class MixedDecodeBlock {
 public:
  static constexpr int kRows = 8 * kColumnTiles;
  static constexpr int kWarps = Copies::kWarps;
  using Parameters = MixedDecodeParameters<typename Copies::Maps>;
  using Entries = MixedEntries<kRows>;
  // Each warp has its own, and gets the same chunks.
  struct ChunksInTurn {
    MixedChunks<kRows> chunks;
    MixedTickets tickets;

    __device__ bool next(MixedChunk& chunk) { return chunks.find(tickets.next(), chunk); }
  };
  using Stream = MixedWarpStream<Element, kHeadDim, kWarps, Copies, ChunksInTurn>;
  using Attention = MixedWarpAttention<Element, kHeadDim, kColumnTiles>;
  using Partial = DecodePartial<kRows, kHeadDim>;
  static_assert(sizeof(Partial) <= sizeof(typename Stream::Piece));

  struct Shared {
    typename Stream::Ring rings[kWarps];
    int partial_piece[kWarps];  // which piece of its ring holds a warp's partial
    int next_chunk;
    unsigned long long sum;
    bool finishes_entry;
  };

  __device__ MixedDecodeBlock(const Parameters& parameters, Shared& shared)
      : parameters_(parameters),
        arguments_(parameters.arguments),
        shared_(shared),
        entries_(parameters.arguments) {}

  __device__ void run() {
    MixedTickets tickets(*parameters_.tickets, shared_.next_chunk);
    if (threadIdx.x == 0) tickets.forget();
    const MixedChunkSizes sizes = mixed_chunk_sizes<kWarps, kRows>(arguments_, shared_.sum);
    work(tickets, {MixedChunks<kRows>(arguments_, sizes), tickets});
    if (threadIdx.x == 0) tickets.finish();
  }

 private:
  __device__ void work(MixedTickets& tickets, const ChunksInTurn& chunks) {
    const int warp = threadIdx.x / 32;
    const auto partial_of = [&shared = shared_](int warp) -> Partial& {
      return reinterpret_cast<Partial&>(shared.rings[warp].pieces[shared.partial_piece[warp]]);
    };
    DecodeResults<Element, kRows, kHeadDim, kWarps, Entries, decltype(partial_of)> results(
        arguments_, entries_, partial_of, parameters_.arrivals, parameters_.partials, shared_.finishes_entry);
    Stream stream(parameters_, chunks, shared_.rings[warp]);
    MixedChunk chunk;
    bool more = stream.next_chunk(chunk);
    while (more) {
      Attention attention(arguments_.scale);
      set_rows(chunk.entry, attention);
      attend(stream, chunk, attention);
      const MixedChunk done = chunk;
      more = stream.next_chunk(chunk);
      if (threadIdx.x % 32 == 0) shared_.partial_piece[warp] = stream.free_piece();
      __syncwarp();
      write_partial(attention, partial_of(warp));
      __syncthreads();
      if (threadIdx.x == 0) tickets.forget();
      if (done.count == 1) {
        results.write_output(done.entry);
      } else {
        results.contribute(done.entry, done.number, done.first_number, done.count);
      }
      stream.release_writes();
      __syncthreads();  // the partials give way to the rings
    }
  }

  // Rows past the pack's are zeros; their results are not read.
  __device__ void set_rows(const DecodeEntry& entry, Attention& attention) {
    const int lane = threadIdx.x % 32;
    const int rows = entries_.rows(entry);
#pragma unroll
    for (int tile = 0; tile < kColumnTiles; ++tile) {
      const int row = 8 * tile + lane / 4;
      attention.set_query(tile, row < rows ? static_cast<const Element*>(arguments_.query) +
                                                 entries_.token(entry, row) * arguments_.query_token_stride +
                                                 entries_.query_head(entry, row) * arguments_.query_head_stride
                                           : nullptr);
    }
#pragma unroll
    for (int column = 0; column < 2 * kColumnTiles; ++column) {
      const int row = column / 2 * 8 + lane % 4 * 2 + column % 2;
      attention.set_visible_keys(column, row < rows ? entries_.visible_keys(entry, row) : 0);
    }
  }

  __device__ void attend(Stream& stream, const MixedChunk& chunk, Attention& attention) {
    const int fewest_visible = entries_.visible_keys(chunk.entry, 0);
    const int key_count = entries_.key_count(chunk.entry.cache_head);
    for (int block = chunk.first_block + threadIdx.x / 32; block < chunk.end_block; block += kWarps) {
      const int first_key = block * kMixedBlockTokens;
      const auto* piece = &stream.next();
      if (stream.sparse()) {
        attention.score_sparse(piece->sparse_keys);
      } else {
        attention.template score_dense<0>(piece->dense_half);
        attention.template score_dense<1>(stream.next().dense_half);
      }
      attention.weigh(first_key, first_key + kMixedBlockTokens > fewest_visible);
      auto* values = &stream.next();
      if (stream.sparse()) {
        attention.add_sparse(values->sparse_values);
      } else {
        clear_rows(stream, values->dense_half, key_count - first_key);
        attention.template add_dense<0>(values->dense_half);
        values = &stream.next();
        clear_rows(stream, values->dense_half, key_count - first_key - kMixedHalfTokens);
        attention.template add_dense<1>(values->dense_half);
      }
    }
  }

  // Behind a sequence's last value a block may hold anything, which times a weight of zero need not be zero.
  __device__ void clear_rows(Stream& stream, MixedPanels<Element, kHeadDim>& values, int first_row) {
    if (first_row >= kMixedHalfTokens) return;
    const int lane = threadIdx.x % 32;
    for (int row = max(0, first_row); row < kMixedHalfTokens; ++row) {
      for (auto& panel : values.panels) reinterpret_cast<uint32_t*>(panel[row])[lane] = 0;
    }
    stream.release_writes();
    __syncwarp();
  }

  __device__ void write_partial(Attention& attention, Partial& partial) {
    attention.finish();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int column = 0; column < 2 * kColumnTiles; ++column) {
      const int row = column / 2 * 8 + lane % 4 * 2 + column % 2;
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

  const Parameters& parameters_;
  const MixedAttentionArguments& arguments_;
  Shared& shared_;
  const Entries entries_;
};

template <typename Element, int kHeadDim, int kColumnTiles, typename Copies>
__global__ void __launch_bounds__(32 * Copies::kWarps, 1)
    mixed_decode_kernel(const __grid_constant__ MixedDecodeParameters<typename Copies::Maps> parameters) {
  using Block = MixedDecodeBlock<Element, kHeadDim, kColumnTiles, Copies>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Block(parameters, *reinterpret_cast<typename Block::Shared*>(shared_memory)).run();
}

}  // namespace kv
