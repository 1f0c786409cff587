// How decode attention is shared out: the keys of all entries, in units of some tokens, form one line that is
// cut into equal spans, one for each thread block. Device code.
//
// An entry is one kv head of one sequence with up to 16 of the query heads that read it: (batch entry, kv head,
// pack of query heads). A span meets several entries and an entry several spans; the piece where they meet is
// one segment.
#pragma once

#include <cstdint>

#include "kernels/paged-attention.h"

namespace kv {

template <int kUnitTokens, int kPackHeads>
class DecodeSplit {
 public:
  __device__ explicit DecodeSplit(const PagedAttentionArguments& arguments)
      : arguments_(arguments),
        group_((arguments.query_heads / arguments.kv_heads)),
        packs_((group_ + kPackHeads - 1) / kPackHeads) {}

  __device__ int entries() const { return arguments_.batch * arguments_.kv_heads * packs_; }
  __device__ int batch_entry(int entry) const { return entry / (arguments_.kv_heads * packs_); }
  __device__ int kv_head(int entry) const { return entry / packs_ % arguments_.kv_heads; }
  __device__ int first_head(int entry) const { return kv_head(entry) * group_ + entry % packs_ * kPackHeads; }
  __device__ int heads(int entry) const { return min(kPackHeads, group_ - entry % packs_ * kPackHeads); }

  __device__ int64_t table_row(int entry) const {
    return int64_t{arguments_.slots[batch_entry(entry)]} * arguments_.kv_heads + kv_head(entry);
  }

  // An entry without keys still takes one unit, so that its output is written.
  __device__ int units(int key_count) const { return max(1, (key_count + kUnitTokens - 1) / kUnitTokens); }
  __device__ int units_of(int entry) const { return units(arguments_.key_counts[table_row(entry)]); }

 private:
  const PagedAttentionArguments& arguments_;
  int group_;
  int packs_;
};

// The cut itself.
struct DecodeSpans {
  int64_t units;  // of all entries
  int count;

  __device__ int64_t first_unit(int span) const { return units * span / count; }
  __device__ int span_of(int64_t unit) const { return static_cast<int>(((unit + 1) * count - 1) / units); }
};

}  // namespace kv
