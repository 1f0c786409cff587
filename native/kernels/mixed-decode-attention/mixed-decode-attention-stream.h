// Streaming of a mixed cache by one warp: every kWarps-th block of segment after segment, in pieces that pass through a
// ring in shared memory. A piece is a sparse block or half of a dense one, which are about as large. Device code.
#pragma once

#include <cstdint>

#include "kernels/mixed-decode-attention/mixed-decode-attention-line.h"
#include "kernels/mixed-decode-attention/mixed-decode-attention-warp.h"
#include "kernels/stage-ring.h"

namespace kv {

template <typename Element, int kHeadDim>
union alignas(1024) MixedPiece {
  MixedPanels<Element, kHeadDim> dense_half;
  SparseKeys<Element, kHeadDim> sparse_keys;
  SparseValues<Element, kHeadDim> sparse_values;
};

// Copies is how pieces travel: kSlots, and for a slot of the ring start_sparse, start_dense_half, start_nothing, wait
// and release_writes. Source says which segment comes next: bool next(MixedSegment&).
template <typename Element, int kHeadDim, int kWarps, typename Copies, typename Source>
class MixedWarpStream {
 public:
  static constexpr int kSlots = Copies::kSlots;
  using Piece = MixedPiece<Element, kHeadDim>;
  struct Ring {
    Piece pieces[kSlots];
    typename Copies::Shared copies;
    bool sparse[kSlots];
  };

  template <typename Parameters>
  __device__ MixedWarpStream(const Parameters& parameters, const Source& source, Copies& copies, Ring& ring)
      : arguments_(parameters.arguments), source_(source), ring_(ring), copies_(copies) {}

  // Requests pieces, where there are any, until so many are not yet taken. The piece last taken gives way.
  __device__ void fill(int pieces) {
    __syncwarp();
    while (find_block() && requested_ < pieces) request();
  }

  // Goes on with the next segment, after a fill and once all pieces of the one before were taken. False when there is
  // none. Whether there is one every warp knows since that fill.
  __device__ bool next_segment(MixedSegment& segment) {
    segment = segment_;
    ahead_ = false;
    return found_;
  }

  // Which piece is free after a fill of less than the whole ring.
  __device__ int free_piece() const { return (taking_.stage + kSlots - 1) % kSlots; }

  // Takes the next piece, after a fill.
  __device__ Piece& take() {
    for (int missing = requested_; missing < kSlots; ++missing) copies_.start_nothing();
    copies_.wait(taking_);
    Piece& piece = ring_.pieces[taking_.stage];
    sparse_ = ring_.sparse[taking_.stage];
    taking_.advance();
    --requested_;
    return piece;
  }

  // Whether the piece last taken is a sparse block.
  __device__ bool sparse() const { return sparse_; }

  // To be called by lanes that wrote to a piece, before it gives way.
  __device__ void release_writes() { copies_.release_writes(); }

 private:
  // Whether there is a block to request. Goes on with the next segment, but not with the one after it.
  __device__ bool find_block() {
    if (block_ < segment_.end_block) return true;
    if (ahead_ || !found_) return false;
    ahead_ = true;
    found_ = source_.next(segment_);
    if (!found_) segment_ = {};
    row_start_ = found_ ? segment_.table_row * arguments_.table_width : 0;
    block_ = segment_.first_block + threadIdx.x / 32;
    look_up();
    return block_ < segment_.end_block;
  }

  __device__ void look_up() {
    if (block_ >= segment_.end_block) return;
    key_place_ = arguments_.block_table[row_start_ + block_];
    value_place_ = arguments_.value_table[row_start_ + block_];
  }

  __device__ void request() {
    const bool of_keys = part_ < 2;
    const int place = of_keys ? key_place_ : value_place_;
    const bool sparse = place < 0;
    Piece& piece = ring_.pieces[requesting_.stage];
    if (threadIdx.x % 32 == 0) ring_.sparse[requesting_.stage] = sparse;
    if (sparse) {
      copies_.start_sparse(of_keys ? arguments_.sparse_keys : arguments_.sparse_values, -place - 1, &piece,
                           requesting_);
    } else {
      copies_.start_dense_half(of_keys, place - 1, part_ % 2, &piece, requesting_);
    }
    requesting_.advance();
    ++requested_;
    part_ += sparse ? 2 : 1;
    if (part_ < 4) return;
    part_ = 0;
    block_ += kWarps;
    look_up();
  }

  const MixedAttentionArguments& arguments_;
  Source source_;
  Ring& ring_;
  Copies& copies_;
  RingPosition<kSlots> requesting_;
  RingPosition<kSlots> taking_;
  int requested_ = 0;  // pieces that were not yet taken
  bool sparse_ = false;
  // The segment that pieces are requested of.
  MixedSegment segment_;
  bool ahead_ = false;  // of the segment whose pieces are taken
  bool found_ = true;
  // What to request next: half part_ % 2 of the keys (0, 1) or values (2, 3) of block_.
  int64_t row_start_ = 0;
  int block_ = 0;
  int part_ = 0;
  int key_place_ = 0;
  int value_place_ = 0;
};

}  // namespace kv
