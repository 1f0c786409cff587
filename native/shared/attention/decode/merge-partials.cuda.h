// Merges the partial results that warps and thread blocks computed over different keys of an entry. Device code.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/arithmetic.cuda.h"
#include "shared/attention/decode/work-spans.cuda.h"
#include "shared/attention/online-softmax.cuda.h"
#include "shared/cuda/arrivals.cuda.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// The partial result over some keys of an entry: its output is not normalised, and weights are exp2(score -
// reference).
template <int kRows, int kHeadDim>
struct DecodePartial {
  float reference[kRows];
  float sum[kRows];
  float output[kRows][kHeadDim];
};

// Merges four neighbouring dims of one row.
class MergedPartial {
 public:
  // Adds several partials at once, so that none waits for another. A partial with a reference of minus infinity adds
  // nothing.
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

  __device__ float4 mean() const {
    const float normalizer = OnlineSoftmax::normalizer(sum_);
    return make_float4(output_.x * normalizer, output_.y * normalizer, output_.z * normalizer,
                       output_.w * normalizer);
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

// Merges `count` partials, which lie in shared or in global memory, in their order, and calls use(merged, row, dim) with each
// result. `threads` threads share the work; this one has the number `thread`.
template <int kRows, int kHeadDim, typename Use>
__device__ void merge_partials(const DecodePartial<kRows, kHeadDim>* partials, int count, int rows, int thread, int threads,
                               const Use& use) {
  constexpr int kAtOnce = 12;
  for (int i = thread; i < rows * kHeadDim / 4; i += threads) {
    const int row = i / (kHeadDim / 4);
    const int dim = i % (kHeadDim / 4) * 4;
    MergedPartial merged;
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
      float references[kAtOnce];
      float sums[kAtOnce];
      float4 outputs[kAtOnce];
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) {
        references[part] = -INFINITY;
        sums[part] = 0.0f;
        outputs[part] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + part >= count) continue;
        const auto& partial = partials[first + part];
        references[part] = partial.reference[row];
        sums[part] = partial.sum[row];
        outputs[part] = *reinterpret_cast<const float4*>(&partial.output[row][dim]);
      }
      merged.add(references, sums, outputs);
    }
    use(merged, row, dim);
  }
}

// Writes four neighbouring dims of the output of a token's query head. The thread of the first four writes the
// log-sum-exp too.
template <typename Element>
__device__ void write_row(const PagedAttentionArguments& arguments, int64_t token, int head, float4 outputs,
                          float log_sum_exp, int dim) {
  *reinterpret_cast<uint2*>(static_cast<Element*>(arguments.output) + token * arguments.output_token_stride +
                            head * arguments.output_head_stride + dim) =
      make_uint2(ptx::pack<Element>(outputs.x, outputs.y), ptx::pack<Element>(outputs.z, outputs.w));
  if (arguments.log_sum_exp != nullptr && dim == 0) {
    arguments.log_sum_exp[token * arguments.query_heads + head] = log_sum_exp;
  }
}

template <typename Element>
__device__ void write_row(const PagedAttentionArguments& arguments, int64_t token, int head,
                          const MergedPartial& merged, int dim) {
  write_row<Element>(arguments, token, head, merged.mean(), merged.log_sum_exp(), dim);
}

template <typename Element>
struct MeanWriter {
  const PagedAttentionArguments& arguments;

  __device__ void operator()(int64_t token, int head, const MergedPartial& merged, int dim) const {
    write_row<Element>(arguments, token, head, merged, dim);
  }
};

// Turns the partials of a thread block's warps into results, which write(token, head, merged, dim) gets. All threads of the
// block must call it.
template <int kRows, int kHeadDim, int kWarps, typename Entries, typename Write>
class DecodeResults {
 public:
  using Partial = DecodePartial<kRows, kHeadDim>;

  // `arrivals`, [entry], counts the thread blocks that have written their partial; it is 0 before and after. In
  // `partials`, those of one entry are consecutive. `finishes` is in shared memory.
  __device__ DecodeResults(const Entries& entries, const Partial* of_warps, const Write& write, unsigned* arrivals,
                           void* partials, bool& finishes)
      : entries_(entries),
        of_warps_(of_warps),
        write_(write),
        arrivals_(arrivals),
        partials_(static_cast<Partial*>(partials)),
        finishes_(finishes) {}

  // Writes this block's partial, number `own`, of an entry that has `count` partials from number `first` on. The last
  // block that arrives merges them all and writes the result; an entry's only block does so at once. All merging runs the
  // same instructions, since each must be fetched.
  __device__ void contribute(const DecodeEntry& entry, const DecodeHead& head, int64_t own, int64_t first, int count) {
    const Partial* from = of_warps_;
    int parts = kWarps;
    Partial* to = count == 1 ? nullptr : &partials_[own];
#pragma unroll 1
    for (;;) {
      const auto use = [&](const MergedPartial& merged, int row, int dim) {
        if (to != nullptr) {
          merged.write(*to, row, dim);
        } else {
          write_(entries_.token(head, entry, row), entries_.query_head(entry, row), merged, dim);
        }
      };
      merge_partials(from, parts, entries_.rows(head, entry), threadIdx.x, 32 * kWarps, use);
      if (to == nullptr) return;
      __syncthreads();
      if (threadIdx.x == 0) finishes_ = arrives_last(arrivals_[entry.index], static_cast<unsigned>(count));
      __syncthreads();
      if (!finishes_) return;
      from = &partials_[first];
      parts = count;
      to = nullptr;
    }
  }

 private:
  const Entries entries_;
  const Partial* of_warps_;
  const Write write_;
  unsigned* arrivals_;
  Partial* partials_;
  bool& finishes_;
};

}  // namespace kv
