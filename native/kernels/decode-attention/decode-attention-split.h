// How decode attention is shared out. Device code.
//
// An entry is one kv head of one sequence with up to kPackHeads of the query heads that read it. The keys of
// all entries, in units of some tokens, form one line, which is cut into equal spans, one for each thread
// block. The piece where a span and an entry meet is a segment.
#pragma once

#include <cstdint>

#include "kernels/paged-attention.h"

namespace kv {

template <int kUnitTokens, int kPackHeads>
class DecodeEntries {
 public:
  __device__ explicit DecodeEntries(const PagedAttentionArguments& arguments)
      : arguments_(arguments),
        group_(arguments.query_heads / arguments.kv_heads),
        packs_((group_ + kPackHeads - 1) / kPackHeads) {}

  __device__ int count() const { return arguments_.batch * arguments_.kv_heads * packs_; }
  __device__ int batch_entry(int entry) const { return entry / (arguments_.kv_heads * packs_); }
  __device__ int first_head(int entry) const { return kv_head(entry) * group_ + entry % packs_ * kPackHeads; }
  __device__ int heads(int entry) const { return min(kPackHeads, group_ - entry % packs_ * kPackHeads); }

  // The row of the block table and of the key counts.
  __device__ int64_t cache_head(int entry) const {
    return int64_t{arguments_.slots[batch_entry(entry)]} * arguments_.kv_heads + kv_head(entry);
  }

  // An entry without keys still takes one unit, so that its output is written.
  __device__ int units(int entry) const {
    return max(1, (arguments_.key_counts[cache_head(entry)] + kUnitTokens - 1) / kUnitTokens);
  }

 private:
  __device__ int kv_head(int entry) const { return entry / packs_ % arguments_.kv_heads; }

  const PagedAttentionArguments& arguments_;
  int group_;
  int packs_;
};

class DecodeSpans {
 public:
  // No more spans than units: none is empty.
  __device__ DecodeSpans(int64_t units, int blocks)
      : units_(units), count_(static_cast<int>(min(units, int64_t{blocks}))) {}

  __device__ int count() const { return count_; }
  __device__ int64_t first_unit(int span) const { return units_ * span / count_; }
  __device__ int span_of(int64_t unit) const { return static_cast<int>(((unit + 1) * count_ - 1) / units_); }

 private:
  int64_t units_;
  int count_;
};

}  // namespace kv
