// One streaming warp of decode attention over 2:4 blocks: it reads every kWarps-th block of range after range. Blocks
// pass through a ring in shared memory in pieces. A piece is a sparse block or half of a dense block, which have
// about the same size. Device code.
#pragma once

#include <cstdint>

#include "kernels/decode-attention-24/decode-attention-24-plan.cuda.h"
#include "kernels/decode-attention-24/decode-attention-24-warp.cuda.h"

namespace kv {

template <typename Element, int kHeadDim>
union alignas(1024) Piece24 {
  Panels24<Element, kHeadDim> dense_half;
  SparseKeys<Element, kHeadDim> sparse_keys;
  SparseValues<Element, kHeadDim> sparse_values;
};

// `Copies` says how pieces are copied. It has kSlots, the length of the ring. For a slot it has start_sparse,
// start_dense_half, start_nothing and wait, and release_writes for all.
template <typename Element, int kHeadDim, typename Copies>
class WarpStream24 {
 public:
  static constexpr int kSlots = Copies::kSlots;
  static constexpr int kWarps = Copies::kWarps;
  using Piece = Piece24<Element, kHeadDim>;
  struct Ring {
    Piece pieces[kSlots];
    typename Copies::Shared copies;
    bool sparse[kSlots];
  };

  __device__ WarpStream24(const Attention24Arguments& arguments, Plan24& plan, Copies& copies, Ring& ring)
      : arguments_(arguments), plan_(plan), ring_(ring), copies_(copies) {}

  // Starts the copies of all pieces that the ring has room for, as far as the plan goes. This overwrites the piece
  // that was taken last.
  __device__ void fill() {
    __syncwarp();
    while (requested_ < kSlots && find_block()) request();
  }

  // Returns the next piece. `fill` must be called before.
  __device__ Piece& take() {
    for (int missing = requested_; missing < kSlots; ++missing) copies_.start_nothing();
    copies_.wait(taking_);
    Piece& piece = ring_.pieces[taking_.stage];
    sparse_ = ring_.sparse[taking_.stage];
    taking_.advance();
    --requested_;
    return piece;
  }

  // Whether the piece that was taken last is a sparse block.
  __device__ bool sparse() const { return sparse_; }

  // Must be called by lanes that wrote to a piece, before the piece is overwritten.
  __device__ void release_writes() { copies_.release_writes(); }

 private:
  // Whether there is a block to copy. It does not wait for the plan.
  __device__ bool find_block() {
    while (block_ >= range_blocks_) {
      if (!plan_.ring.is_full(next_range_)) return false;
      const BlockRange24& range = plan_.ranges[next_range_.stage];
      if (range.nothing) return false;
      range_ = next_range_.stage;
      range_blocks_ = range.blocks;
      block_ = range.template first_of_warp<kWarps>();
      next_range_.advance();
    }
    return true;
  }

  __device__ void request() {
    const bool of_keys = part_ < 2;
    const BlockRange24& range = plan_.ranges[range_];
    const int place = of_keys ? range.key_places[block_] : range.value_places[block_];
    const bool sparse = !is_dense(place);
    Piece& piece = ring_.pieces[requesting_.stage];
    if (threadIdx.x % 32 == 0) ring_.sparse[requesting_.stage] = sparse;
    if (sparse) {
      copies_.start_sparse(of_keys ? arguments_.sparse_keys : arguments_.sparse_values, block_number(place), &piece,
                           requesting_);
    } else {
      copies_.start_dense_half(of_keys, place, part_ % 2, &piece, requesting_);
    }
    requesting_.advance();
    ++requested_;
    part_ += sparse ? 2 : 1;
    if (part_ < 4) return;
    part_ = 0;
    block_ += kWarps;
  }

  const Attention24Arguments& arguments_;
  Plan24& plan_;
  Ring& ring_;
  Copies& copies_;
  RingPosition<kSlots> requesting_;
  RingPosition<kSlots> taking_;
  int requested_ = 0;  // pieces whose copies were started and that were not taken yet
  bool sparse_ = false;
  // The next piece to copy: half part_ % 2 of the keys (part_ 0, 1) or of the values (2, 3) of block_ in a range.
  Plan24::Position next_range_;
  int range_ = 0;
  int range_blocks_ = 0;
  int block_ = 0;
  int part_ = 0;
};

}  // namespace kv
