// How decode attention adds up what warps and blocks computed over different keys of an entry. Device code.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/arithmetic.cuda.h"
#include "shared/attention/decode/work-spans.cuda.h"
#include "shared/attention/online-softmax.cuda.h"
#include "shared/cuda/arrivals.cuda.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Unnormalised output of some of an entry's keys: weights are exp2(score - reference).
template <int kRows, int kHeadDim>
struct DecodePartial {
  float reference[kRows];
  float sum[kRows];
  float output[kRows][kHeadDim];
};

// Four neighbouring dims of one row.
class MergedPartial {
 public:
  // Several partials at once, so that none waits for the one before it; a reference of minus infinity adds nothing.
  template <int kCount>
  __device__ void add(const float (&references)[kCount], const float (&sums)[kCount], const float4 (&outputs)[kCount]) {
    float reference = reference_;
#pragma unroll
    for (int i = 0; i < kCount; ++i) reference = fmaxf(reference, references[i]);
    const float offset = reference == -INFINITY ? 0.0f : reference;
    scale(ptx::exp2_approximate(reference_ - offset));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float factor = ptx::exp2_approximate(references[i] - offset);
      sum_ += sums[i] * factor;
      output_.x += outputs[i].x * factor;
      output_.y += outputs[i].y * factor;
      output_.z += outputs[i].z * factor;
      output_.w += outputs[i].w * factor;
    }
    reference_ = reference;
  }

  template <int kRows, int kHeadDim>
  __device__ void write(DecodePartial<kRows, kHeadDim>& partial, int row, int dim) const {
    *reinterpret_cast<float4*>(&partial.output[row][dim]) = output_;
    if (dim == 0) {
      partial.reference[row] = reference_;
      partial.sum[row] = sum_;
    }
  }

  template <typename Element>
  __device__ void write_mean(Element* output) const {
    const float normalizer = OnlineSoftmax::normalizer(sum_);
    *reinterpret_cast<uint2*>(output) =
        make_uint2(ptx::pack<Element>(output_.x * normalizer, output_.y * normalizer),
                   ptx::pack<Element>(output_.z * normalizer, output_.w * normalizer));
  }

  __device__ float log_sum_exp() const { return OnlineSoftmax::log_sum_exp(reference_, sum_); }

 private:
  __device__ void scale(float factor) {
    sum_ *= factor;
    output_ = {output_.x * factor, output_.y * factor, output_.z * factor, output_.w * factor};
  }

  float reference_ = -INFINITY;
  float sum_ = 0.0f;
  float4 output_ = {0.0f, 0.0f, 0.0f, 0.0f};
};

// Each of kWarps warps merges every kWarps-th of the partials into its own.
template <int kWarps, int kRows, int kHeadDim>
__device__ void merge_blocks(const DecodePartial<kRows, kHeadDim>* partials, int count, int rows,
                             DecodePartial<kRows, kHeadDim>& destination) {
  constexpr int kRowsAtOnce = 4;
  constexpr int kAtOnce = 4;
  const int dim = threadIdx.x % 32 * 4;
  if (dim >= kHeadDim) return;
  for (int first_row = 0; first_row < rows; first_row += kRowsAtOnce) {
    MergedPartial merged[kRowsAtOnce];
    for (int first = threadIdx.x / 32; first < count; first += kWarps * kAtOnce) {
      float references[kRowsAtOnce][kAtOnce];
      float sums[kRowsAtOnce][kAtOnce];
      float4 outputs[kRowsAtOnce][kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const bool there = first + i * kWarps < count;
        const auto& partial = partials[there ? first + i * kWarps : first];
#pragma unroll
        for (int j = 0; j < kRowsAtOnce; ++j) {
          const int row = min(first_row + j, rows - 1);
          references[j][i] = there ? partial.reference[row] : -INFINITY;
          sums[j][i] = partial.sum[row];
          outputs[j][i] = *reinterpret_cast<const float4*>(&partial.output[row][dim]);
        }
      }
#pragma unroll
      for (int j = 0; j < kRowsAtOnce; ++j) merged[j].add(references[j], sums[j], outputs[j]);
    }
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) merged[j].write(destination, min(first_row + j, rows - 1), dim);
  }
}

// Calls use(merged, row, dim) with what the warps' partials, partial_of(warp), add up to. So many threads share the work,
// this one being number `thread`.
template <int kWarps, int kHeadDim, typename PartialOf, typename Use>
__device__ void merge_warps(int rows, int thread, int threads, const PartialOf& partial_of, const Use& use) {
  for (int i = thread; i < rows * kHeadDim / 4; i += threads) {
    const int row = i / (kHeadDim / 4);
    const int dim = i % (kHeadDim / 4) * 4;
    float references[kWarps];
    float sums[kWarps];
    float4 outputs[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const auto& partial = partial_of(warp);
      references[warp] = partial.reference[row];
      sums[warp] = partial.sum[row];
      outputs[warp] = *reinterpret_cast<const float4*>(&partial.output[row][dim]);
    }
    MergedPartial merged;
    merged.add(references, sums, outputs);
    use(merged, row, dim);
  }
}

// The output of four neighbouring dims of a token's query head, and with the first of them its log-sum-exp.
template <typename Element>
__device__ void write_row(const PagedAttentionArguments& arguments, int64_t token, int head,
                          const MergedPartial& merged, int dim) {
  merged.write_mean(static_cast<Element*>(arguments.output) + token * arguments.output_token_stride +
                    head * arguments.output_head_stride + dim);
  if (arguments.log_sum_exp != nullptr && dim == 0) {
    arguments.log_sum_exp[token * arguments.query_heads + head] = merged.log_sum_exp();
  }
}

// Turns the partials of a block's warps, partial_of(warp), into results. All threads of a block call it.
template <typename Element, int kRows, int kHeadDim, int kWarps, typename Entries, typename PartialOf>
class DecodeResults {
 public:
  using Partial = DecodePartial<kRows, kHeadDim>;

  // arrivals: [entry], blocks that have written their partial, 0 before and after. partials: an entry's are neighbours.
  // `finishes`: in shared memory.
  __device__ DecodeResults(const PagedAttentionArguments& arguments, const Entries& entries,
                           const PartialOf& partial_of, unsigned* arrivals, void* partials, bool& finishes)
      : arguments_(arguments),
        entries_(entries),
        partial_of_(partial_of),
        arrivals_(arrivals),
        partials_(static_cast<Partial*>(partials)),
        finishes_(finishes) {}

  // Of an entry that is this block's alone.
  __device__ void write_output(const DecodeEntry& entry) {
    merge_own_warps(entry, [&](const MergedPartial& merged, int row, int dim) {
      write_row<Element>(arguments_, entries_.token(entry, row), entries_.query_head(entry, row), merged, dim);
    });
  }

  // Of an entry that has several partials, `count` from `first`; of them this block computed `own`. The last block to
  // come merges them.
  __device__ void contribute(const DecodeEntry& entry, int64_t own, int64_t first, int count) {
    merge_own_warps(entry, [&](const MergedPartial& merged, int row, int dim) {
      merged.write(partials_[own], row, dim);
    });
    __syncthreads();
    if (threadIdx.x == 0) finishes_ = arrives_last(arrivals_[entry.index], static_cast<unsigned>(count));
    __syncthreads();
    if (!finishes_) return;
    merge_blocks<kWarps>(&partials_[first], count, entries_.rows(entry), partial_of_(threadIdx.x / 32));
    __syncthreads();
    write_output(entry);
  }

 private:
  template <typename Use>
  __device__ void merge_own_warps(const DecodeEntry& entry, const Use& use) {
    merge_warps<kWarps, kHeadDim>(entries_.rows(entry), threadIdx.x, 32 * kWarps, partial_of_, use);
  }

  const PagedAttentionArguments& arguments_;
  const Entries entries_;
  const PartialOf partial_of_;
  unsigned* arrivals_;
  Partial* partials_;
  bool& finishes_;
};

}  // namespace kv
