// How decode attention is shared out. Device code.
//
// A cache head is one kv head of one batch entry; its rows are the batch entry's queries with the query heads
// that read the kv head, in packs of kPackRows. An entry is one pack of one cache head. The keys of all
// entries, in units of some tokens, form one line, which is cut into equal spans, one for each thread block.
// The piece where a span and an entry meet is a segment.
#pragma once

#include <cstdint>

#include "kernels/paged-attention.h"

namespace kv {

struct DecodeEntry {
  int index;  // among all entries
  int cache_head;
  int pack;
};

template <int kUnitTokens, int kPackRows>
class DecodeEntries {
 public:
  __device__ explicit DecodeEntries(const PagedAttentionArguments& arguments)
      : arguments_(arguments), group_(arguments.query_heads / arguments.kv_heads) {}

  __device__ int cache_heads() const { return arguments_.batch * arguments_.kv_heads; }

  // The row of the block table and of the key counts.
  __device__ int64_t table_row(int cache_head) const {
    return int64_t{arguments_.slots[batch_entry(cache_head)]} * arguments_.kv_heads +
           cache_head % arguments_.kv_heads;
  }
  __device__ int key_count(int cache_head) const { return arguments_.key_counts[table_row(cache_head)]; }
  __device__ int packs(int cache_head) const {
    return (queries(cache_head) * group_ + kPackRows - 1) / kPackRows;
  }
  // Of each pack. Without keys still one, so that the output is written.
  __device__ int units(int cache_head) const {
    return max(1, (key_count(cache_head) + kUnitTokens - 1) / kUnitTokens);
  }

  __device__ int rows(const DecodeEntry& entry) const {
    return min(kPackRows, queries(entry.cache_head) * group_ - entry.pack * kPackRows);
  }
  __device__ int64_t token(const DecodeEntry& entry, int row) const {
    return arguments_.query_start[batch_entry(entry.cache_head)] + query(entry, row);
  }
  __device__ int query_head(const DecodeEntry& entry, int row) const {
    return entry.cache_head % arguments_.kv_heads * group_ + (entry.pack * kPackRows + row) % group_;
  }
  // How many keys the row sees.
  __device__ int visible_keys(const DecodeEntry& entry, int row) const {
    const int keys = key_count(entry.cache_head);
    return arguments_.causal ? keys - queries(entry.cache_head) + query(entry, row) + 1 : keys;
  }

  // The entry after this one; only where there is one.
  __device__ DecodeEntry next(DecodeEntry entry) const {
    ++entry.index;
    ++entry.pack;
    while (entry.pack >= packs(entry.cache_head)) {
      ++entry.cache_head;
      entry.pack = 0;
    }
    return entry;
  }

 private:
  __device__ int batch_entry(int cache_head) const { return cache_head / arguments_.kv_heads; }
  __device__ int queries(int cache_head) const {
    const int32_t* start = arguments_.query_start + batch_entry(cache_head);
    return start[1] - start[0];
  }
  __device__ int query(const DecodeEntry& entry, int row) const {
    return (entry.pack * kPackRows + row) / group_;
  }

  const PagedAttentionArguments& arguments_;
  const int group_;
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
