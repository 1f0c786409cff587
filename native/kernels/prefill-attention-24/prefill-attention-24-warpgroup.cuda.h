// Attention of kRows query rows by one warpgroup over blocks of 64 keys, dense or 2:4 sparse (sm_90a). Device code.
//
// Everything is transposed, as in prefill-attention-24-warp.cuda.h: S^T = K Q^T is [key, row], O^T = V^T P^T is [dim,
// row]. Warp w has the scores of the keys 16 w .. 16 w + 15 of a block, so the four warps share all rows.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "kernels/prefill-attention-24/prefill-attention-24-products.cuda.h"
#include "kernels/prefill-attention-24/prefill-attention-24-warp.cuda.h"
#include "kernels/prefill-attention-24/prefill-attention-24-work.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/named-barrier.cuda.h"
#include "ptx/shared-address.cuda.h"
#include "ptx/tensor-copy.cuda.h"
#include "ptx/wgmma.cuda.h"
#include "shared/attention/hopper/tiles.cuda.h"
#include "shared/attention/hopper/warp-roles.cuda.h"

namespace kv::sm90a {

// A block that a warpgroup reads. Lane 0, which will release the stage, knows for its warp whether the block is sparse.
template <int kWords>
struct BlockOperand24 {
  const void* block;
  int sparse;  // 0 in the other lanes
  uint32_t metadata[kWords];  // of this thread; no meaning if the block is dense
};

template <typename Element, int kDim, int kRows>
struct alignas(1024) WarpgroupStorage24 {
  Element query[kDim / 64][kRows][64];  // swizzled; then the outputs, [row, dim], in swizzled chunks
  // P^T of two blocks, swizzled: [panel of 64 rows, key, row].
  Element weights[2][(kRows + 63) / 64][kBlock24Tokens][64];
  float reference[kRows];
  float of_row[kRows];  // what threads tell each other of a row
};

// Rows of a thread are numbered by column: column c is row 8 * (c / 2) + lane % 4 * 2 + c % 2.
template <typename Element, int kDim, int kRows>
class PrefillWarpgroup24 {
 public:
  static constexpr int kPanels = kDim / 64;
  static constexpr int kColumns = kRows / 4;
  static constexpr int kRowTiles = kRows / 8;
  static constexpr uint32_t kAllColumns = 0xffffffffu;
  using Storage = WarpgroupStorage24<Element, kDim, kRows>;
  using Products = BlockProducts24<Element, kRows>;
  using Operand = BlockOperand24<kPanels>;

  // `barrier` is the number of a barrier that this warpgroup alone uses.
  __device__ PrefillWarpgroup24(float scale, Storage& shared, int barrier)
      : scale_log2_(scale * kLog2E),
        shared_(shared),
        barrier_(barrier),
        kept_thread_(__shfl_sync(kFullWarp, thread(), lane())) {
    const int key = kept_thread_ / 32 * 16 + kept_thread_ % 16;
    stored_weights_ = ptx::shared_address(shared_.weights[0][0][key]) + ((kept_thread_ / 16 % 2 ^ key % 8) << 4);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      reference_[c] = kNothing;
      sum_[c] = 0.0f;
    }
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) output_[panel][i] = 0.0f;
    }
  }

  // What the products with a block that has landed in a stage read. `Ring` has `blocks` and `sparse`.
  template <class Ring>
  __device__ __forceinline__ Operand keys(const Ring& ring, int stage) const {
    Operand keys{&ring.blocks[stage], kept_thread_ % 32 == 0 ? ring.sparse[stage] : 0};
#pragma unroll
    for (int i = 0; i < kPanels; ++i) keys.metadata[i] = ring.blocks[stage].metadata[kept_thread_ * kPanels + i];
    return keys;
  }

  template <class Ring>
  __device__ __forceinline__ Operand values(const Ring& ring, int stage) const {
    Operand values{&ring.blocks[stage], kept_thread_ % 32 == 0 ? ring.sparse[stage] : 0};
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      values.metadata[i] = ring.blocks[stage].metadata[i * kWarpgroupThreads + kept_thread_];
    }
    return values;
  }

  // Issues the products that make the scores, as one group of wgmma.
  __device__ __forceinline__ void score(const Operand& keys) {
    const uint64_t dense = ptx::wgmma_operand(keys.block);
    const uint64_t non_zeros = kDim == 128 ? dense : ptx::wgmma_narrow_operand(keys.block);
    Products::keys(scores_, non_zeros, dense, ptx::wgmma_operand(shared_.query),
                   __any_sync(kFullWarp, keys.sparse), keys.metadata);
  }

  // Issues the products of the latest weights with their values, as one group of wgmma.
  __device__ __forceinline__ void accumulate(const Operand& values) {
    const uint64_t weights = ptx::wgmma_operand(shared_.weights[latest_], kWeightPanelBytes);
    const uint64_t block = ptx::wgmma_operand(values.block);
    const bool sparse = __any_sync(kFullWarp, values.sparse);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      Products::values(output_[panel], ptx::wgmma_advance(block, panel * 32 * kPanelBytes),
                       ptx::wgmma_advance(block, panel * kBlock24Tokens * kPanelBytes), weights, sparse,
                       values.metadata[panel]);
    }
  }

  // Waits until no more than kPending groups of products are unfinished, of which none is the scores'.
  template <int kPending>
  __device__ __forceinline__ void wait_scores() {
    ptx::wgmma_wait<kPending>();
    ptx::pin_registers(scores_);
  }

  // Waits for all products.
  __device__ __forceinline__ void wait_outputs() {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) ptx::pin_registers(output_[panel]);
  }

  // Hides the keys of a block that rows do not see. The tile's rows from `first_row` on are this warpgroup's.
  __device__ __forceinline__ void mask(const PrefillTile24& tile, int first_row, int block) {
    const int first_key = block * kBlock24Tokens + warp() * 16;
    // Each lane computes this for one row of each 32.
    int seen[kRows / 32];
#pragma unroll
    for (int i = 0; i < kRows / 32; ++i) seen[i] = tile.visible(first_row + 32 * i + lane()) - first_key;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int seen_by_row =
          __shfl_sync(kFullWarp, seen[c / 8], c / 2 % 4 * 8 + lane() % 4 * 2 + c % 2) - lane() / 4;
      float* pair = &scores_[4 * (c / 2) + c % 2];
      if (seen_by_row <= 0) pair[0] = -INFINITY;
      if (seen_by_row <= 8) pair[2] = -INFINITY;
    }
  }

  // Turns the scores into weights, which `accumulate` reads. Returns whether this thread's weights are too large. The
  // weights of a block are added to the sums once: those of a block that is weighed `again` only where they overflowed.
  template <bool kAgain>
  __device__ __forceinline__ bool weigh() {
    const uint32_t first = stored_weights_ + (latest_ ^ 1) * static_cast<uint32_t>(sizeof(Storage::weights[0]));
    float largest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kRowTiles; j += 2) {
      uint32_t fragment[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* four = &scores_[4 * (j + h)];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = 2 * (j + h) + i;
          four[i] = weight(c, four[i]);
          four[i + 2] = weight(c, four[i + 2]);
          const float added = four[i] + four[i + 2];
          largest[h] = fmaxf(largest[h], added);
          if (!kAgain) {
            sum_[c] += added;
          } else if (sum_[c] == INFINITY) {
            sum_[c] = added;
          }
        }
        fragment[2 * h] = ptx::pack<Element>(four[0], four[1]);
        fragment[2 * h + 1] = ptx::pack<Element>(four[2], four[3]);
      }
      ptx::store_matrices_at((first ^ j % 8 * 16) + j / 8 * kWeightPanelBytes, fragment);
    }
    return fmaxf(largest[0], largest[1]) > kLargest;
  }

  // All threads must call it after `weigh`. Returns false if some thread's weights are too large; these are not kept.
  __device__ __forceinline__ bool agree(bool too_large) {
    ptx::fence_async_proxy();
    if (__any_sync(kFullWarp, ptx::named_barrier_any(barrier_, kWarpgroupThreads, too_large))) return false;
    latest_ ^= 1;
    return true;
  }

  // The columns in which this thread's weights of the scores are too large, as bits.
  __device__ __forceinline__ uint32_t columns_to_raise() const {
    uint32_t columns = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float* pair = &scores_[4 * (c / 2) + c % 2];
      columns |= (weight(c, pair[0]) + weight(c, pair[2]) > kLargest) << c;
    }
    return columns;
  }

  // For rows of which some thread gives the column, moves the reference to the largest of these threads' scores. The
  // scores must be those that were weighed.
  __device__ __forceinline__ void raise(uint32_t columns) {
    gather([&](int c) {
      const float* pair = &scores_[4 * (c / 2) + c % 2];
      return (columns >> c & 1) != 0 ? fmaxf(pair[0], pair[2]) : -INFINITY;
    });
    if (thread() < kRows) {
      float maximum = -INFINITY;
#pragma unroll 8
      for (int i = 0; i < kThreadsOfRow; ++i) maximum = fmaxf(maximum, gathered(i, thread()));
      // Rounded up. Otherwise the weights of large scores could exceed 1 by any factor.
      shared_.of_row[thread()] = __fmul_ru(maximum, scale_log2_);
    }
    synchronize();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float maximum = shared_.of_row[row_of(c)];
      const bool raised = maximum > kNothing;
      const float distance = raised ? reference_[c] - maximum : 0.0f;
      const float correction = ptx::exp2_approximate(distance);
      if (raised) reference_[c] = maximum;
      if (sum_[c] != INFINITY) sum_[c] = scaled_sum(sum_[c], distance, correction);
      scale_outputs(c, correction);
    }
    synchronize();
  }

  // Copies the rows from `first_row` on of the tile to shared memory.
  __device__ __forceinline__ void load_queries(const PagedAttentionArguments& arguments, const PrefillTile24& tile,
                                               int first_row) {
    constexpr int kCopies = kRows * kChunks / kWarpgroupThreads;
    const RowPlaces places(tile, first_row);
    const int chunk = thread() % kChunks;
    uint4 elements[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = (i * kWarpgroupThreads + thread()) / kChunks;
      elements[i] = make_uint4(0, 0, 0, 0);
      if (first_row + row < tile.rows) {
        elements[i] = *reinterpret_cast<const uint4*>(
            static_cast<const Element*>(arguments.query) + places.token(row) * arguments.query_token_stride +
            places.query_head(row) * arguments.query_head_stride + chunk * 8);
      }
    }
    synchronize();  // The outputs of the last tile lie there.
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = (i * kWarpgroupThreads + thread()) / kChunks;
      *reinterpret_cast<uint4*>(&shared_.query[chunk / 8][row][(chunk ^ row) % 8 * 8]) = elements[i];
    }
    ptx::fence_async_proxy();
    synchronize();
  }

  // Writes the outputs. Must be called once, after the last block.
  __device__ __forceinline__ void store_outputs(const PagedAttentionArguments& arguments, const PrefillTile24& tile,
                                                int first_row) {
    const RowPlaces places(tile, first_row);
    gather([&](int c) { return sum_[c]; });
    if (thread() < kRows) {
      float sum = 0.0f;
#pragma unroll 8
      for (int i = 0; i < kThreadsOfRow; ++i) sum += gathered(i, thread());
      shared_.of_row[thread()] = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (arguments.log_sum_exp != nullptr && first_row + thread() < tile.rows) {
        arguments.log_sum_exp[places.token(thread()) * arguments.query_heads + places.query_head(thread())] =
            (shared_.reference[thread()] + log2f(sum)) * kLn2;
      }
    }
    synchronize();
#pragma unroll
    for (int c = 0; c < kColumns; ++c) scale_outputs(c, shared_.of_row[row_of(c)]);
    auto& staged = reinterpret_cast<Element(&)[kRows][kDim]>(shared_.query);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int j = 0; j < kRowTiles; j += 2) {
        const int row = 8 * j + lane() / 16 * 8 + lane() % 8;
        const int chunk = (panel * 8 + warp() * 2 + lane() / 8 % 2) ^ row % 8;
        const float* dims = &output_[panel][4 * j];
        const uint32_t fragment[4] = {ptx::pack<Element>(dims[0], dims[1]), ptx::pack<Element>(dims[2], dims[3]),
                                      ptx::pack<Element>(dims[4], dims[5]), ptx::pack<Element>(dims[6], dims[7])};
        ptx::store_matrices_transposed(&staged[row][chunk * 8], fragment);
      }
    }
    synchronize();
    const int chunk = thread() % kChunks;
#pragma unroll 4
    for (int row = thread() / kChunks; row < kRows; row += kWarpgroupThreads / kChunks) {
      const uint4 elements = *reinterpret_cast<const uint4*>(&staged[row][(chunk ^ row % 8) * 8]);
      if (first_row + row >= tile.rows) break;
      *reinterpret_cast<uint4*>(static_cast<Element*>(arguments.output) +
                                places.token(row) * arguments.output_token_stride +
                                places.query_head(row) * arguments.output_head_stride + chunk * 8) = elements;
    }
  }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kLn2 = 0.693147181f;
  // As in prefill-attention-24-softmax.cuda.h.
  static constexpr float kLargest = 256.0f;
  static constexpr float kNothing = -FLT_MAX;

  static constexpr uint32_t kWeightPanelBytes = kBlock24Tokens * kPanelBytes;
  static constexpr int kChunks = kDim / 8;  // of a row
  static constexpr int kThreadsOfRow = 32;
  // Rows of gathered numbers lie so that threads write to different banks, if there is room.
  static constexpr int kGatherStride = kRows + (kRows > 64 ? 8 : 0);
  static_assert(kThreadsOfRow * kGatherStride * sizeof(float) <= sizeof(Storage::weights[0]));

  // Where rows of a tile lie in queries and outputs. They are counted from `first_row` on.
  class RowPlaces {
   public:
    __device__ RowPlaces(const PrefillTile24& tile, int first_row)
        : first_token_(tile.token(first_row)),
          first_head_(tile.kv_head * tile.group),
          skipped_(first_row % tile.group),
          group_(tile.group),
          inverse_(1.0f / tile.group) {}

    __device__ int64_t token(int row) const { return first_token_ + quotient(row); }
    __device__ int query_head(int row) const { return first_head_ + skipped_ + row - quotient(row) * group_; }

   private:
    // Numbers are so small that the fraction is never rounded up to an integer.
    __device__ int quotient(int row) const {
      return static_cast<int>((static_cast<float>(skipped_ + row) + 0.5f) * inverse_);
    }

    int64_t first_token_;
    int first_head_;
    int skipped_;
    int group_;
    float inverse_;
  };

  __device__ __forceinline__ float weight(int column, float score) const {
    return ptx::exp2_approximate(fmaf(score, scale_log2_, -reference_[column]));
  }

  // Where 2^distance is 0 to f32, a sum may still count: it has a block's weights by the old reference, up to 2^128.
  static __device__ __forceinline__ float scaled_sum(float sum, float distance, float correction) {
    const float half = ptx::exp2_approximate(0.5f * distance);
    return correction == 0.0f ? sum * half * half : sum * correction;
  }

  static __device__ int thread() { return threadIdx.x % kWarpgroupThreads; }
  static __device__ int warp() { return threadIdx.x / 32 % 4; }
  static __device__ int lane() { return threadIdx.x % 32; }
  __device__ int row_of(int column) const { return column / 2 * 8 + lane() % 4 * 2 + column % 2; }

  __device__ __forceinline__ void scale_outputs(int column, float factor) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      output_[panel][4 * (column / 2) + column % 2] *= factor;
      output_[panel][4 * (column / 2) + column % 2 + 2] *= factor;
    }
  }

  // Makes numbers of this thread's rows, and the references, visible to the threads that finish the rows. They lie
  // where no weights are needed.
  template <class OfColumn>
  __device__ __forceinline__ void gather(OfColumn of_column) {
    float* mine = reinterpret_cast<float*>(shared_.weights[latest_ ^ 1]) + (warp() * 8 + lane() / 4) * kGatherStride;
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      *reinterpret_cast<float2*>(mine + row_of(c)) = make_float2(of_column(c), of_column(c + 1));
    }
    if (warp() == 0 && lane() < 4) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) shared_.reference[row_of(c)] = reference_[c];
    }
    synchronize();
  }

  __device__ float gathered(int thread_of_row, int row) const {
    return reinterpret_cast<const float*>(shared_.weights[latest_ ^ 1])[thread_of_row * kGatherStride + row];
  }

  __device__ void synchronize() { ptx::named_barrier_sync(barrier_, kWarpgroupThreads); }

  const float scale_log2_;
  Storage& shared_;
  const int barrier_;
  // thread(), made by a shuffle so that the compiler keeps it. Otherwise each step would ask for the thread's number
  // again, and that waits behind stores to shared memory.
  const int kept_thread_;
  uint32_t stored_weights_;  // where this thread stores, in shared memory, in the first of the two weights
  int latest_ = 0;  // which of the storage's weights
  float reference_[kColumns];  // exponents of 2
  float sum_[kColumns];        // this thread's part of the sum
  float scores_[kRows / 2];
  float output_[kPanels][kRows / 2];
};

}  // namespace kv::sm90a
