// How thread blocks share the work of decode attention. Device code.
//
// A cache head is one kv head of one batch entry. Its rows are the entry's queries, with all query heads that read
// the kv head, in packs of kPackRows rows. An entry is one pack of one cache head.
//
// Keys are counted in units of kUnitTokens tokens. The entries lie in a row: of each, what a split costs beside its
// units, and then its units. Each thread block computes one span, an equal part of the row, which may begin or end
// inside an entry. The units of an entry that lie in one span are a split, and give one partial result.
#pragma once

#include <cstdint>

#include "shared/cuda/divisor.cuda.h"
#include "shared/paged/paged-attention.h"
#include "shared/paged/paged-faults.h"

namespace kv {

struct DecodeEntry {
  int index;  // among all entries
  int cache_head;
  int pack;
};

// Numbers from the tables of a cache head, each read once.
struct DecodeHead {
  int32_t first_token;
  int32_t end_token;
  int32_t slot;
  int32_t keys;
};

// With `ahead` the tables are read while the kernel ahead may still change them. The reads then bypass L1, so that a
// later read sees the change. With kWholeUnits a cache head has no part of a unit.
template <int kUnitTokens, int kPackRows, bool kWholeUnits = false>
class DecodeEntries {
 public:
  __device__ explicit DecodeEntries(const PagedAttentionArguments& arguments, bool ahead = false)
      : arguments_(arguments), ahead_(ahead), kv_heads_(arguments.kv_heads), group_(kv_heads_.quotient(arguments.query_heads)) {}

  __device__ int cache_heads() const { return arguments_.batch * arguments_.kv_heads; }

  // Whether the rows and the slot are inside their tensors. If not, nothing else may be asked of this cache head.
  // Reports what is out of range to `faults`, if that is not null.
  __device__ bool read_head(int cache_head, const FaultSink* faults, DecodeHead& head) const {
    const int32_t* start = arguments_.query_start + batch_entry(cache_head);
    head = {read(start), read(start + 1), slot(cache_head), 0};
    const bool ascends =
        head.first_token >= 0 && head.end_token >= head.first_token && head.end_token <= arguments_.query_tokens;
    if (!ascends || head.slot < 0 || head.slot >= arguments_.slot_count) {
      if (faults == nullptr) return false;
      if (ascends) {
        report_fault(*faults, PagedFault::slot_out_of_range, head.slot, 0, arguments_.slot_count);
      } else {
        report_fault(*faults, PagedFault::rows_not_ascending, 0, 0, arguments_.query_tokens);
      }
      return false;
    }
    head.keys = read(arguments_.key_counts + table_row(cache_head, head.slot));
    if (fit(head.keys)) return true;
    if (faults != nullptr) {
      const bool part = kWholeUnits && head.keys % kUnitTokens != 0;
      report_fault(*faults, part ? PagedFault::part_of_block : PagedFault::cache_overflow, head.slot, 0, kUnitTokens);
    }
    head.keys = 0;
    return true;
  }

  // Reads the number of keys again. False if anything else in the tables has changed, or if the number of units has.
  // The reads do not depend on each other, so that their latencies overlap.
  __device__ bool renew(int cache_head, DecodeHead& head) const {
    const int32_t* start = arguments_.query_start + batch_entry(cache_head);
    const int32_t first_token = read(start);
    const int32_t end_token = read(start + 1);
    const int32_t slot = this->slot(cache_head);
    const int32_t keys = read(arguments_.key_counts + table_row(cache_head, head.slot));
    const bool same = first_token == head.first_token && end_token == head.end_token && slot == head.slot &&
                      fit(keys) && units_of(keys) == units_of(head.keys);
    if (same) head.keys = keys;
    return same;
  }

  __device__ int packs(const DecodeHead& head) const { return packs_of(head.end_token - head.first_token); }
  __device__ int units(const DecodeHead& head) const { return units_of(head.keys); }

  // Of a cache head that read_head found inside its tensors.
  __device__ DecodeHead head(int cache_head) const {
    const int32_t* start = arguments_.query_start + batch_entry(cache_head);
    DecodeHead head = {read(start), read(start + 1), slot(cache_head), 0};
    const int32_t keys = read(arguments_.key_counts + table_row(cache_head, head.slot));
    if (fit(keys)) head.keys = keys;  // as read_head
    return head;
  }

  // The row of this cache head in the block table and in the key counts.
  __device__ int64_t table_row(int cache_head, int32_t slot) const {
    return int64_t{slot} * arguments_.kv_heads + kv_heads_.remainder(cache_head);
  }

  __device__ int rows(const DecodeHead& head, const DecodeEntry& entry) const {
    return rows_of(head.end_token - head.first_token, entry);
  }
  __device__ int64_t token(const DecodeHead& head, const DecodeEntry& entry, int row) const {
    return head.first_token + query(entry, row);
  }
  __device__ int query_head(const DecodeEntry& entry, int row) const {
    return kv_heads_.remainder(entry.cache_head) * group_.divisor() + group_.remainder(entry.pack * kPackRows + row);
  }
  // How many keys the row sees.
  __device__ int visible_keys(const DecodeHead& head, const DecodeEntry& entry, int row) const {
    return visible_of(head.keys, head.end_token - head.first_token, entry, row);
  }

  // Goes on to the next entry, which must exist; `head` is its cache head.
  __device__ void advance(DecodeEntry& entry, DecodeHead& head) const {
    ++entry.index;
    ++entry.pack;
    while (entry.pack >= packs(head)) {
      head = this->head(++entry.cache_head);
      entry.pack = 0;
    }
  }

 private:
  __device__ int32_t read(const int32_t* number) const { return ahead_ ? __ldcg(number) : *number; }
  __device__ int32_t slot(int cache_head) const { return read(arguments_.slots + batch_entry(cache_head)); }
  __device__ int packs_of(int queries) const { return (queries * group_.divisor() + kPackRows - 1) / kPackRows; }
  __device__ int rows_of(int queries, const DecodeEntry& entry) const {
    return min(kPackRows, queries * group_.divisor() - entry.pack * kPackRows);
  }
  __device__ int visible_of(int keys, int queries, const DecodeEntry& entry, int row) const {
    return arguments_.causal ? keys - queries + query(entry, row) + 1 : keys;
  }
  static __device__ int units_of(int32_t keys) { return max(1, (keys + kUnitTokens - 1) / kUnitTokens); }
  __device__ bool fit(int32_t keys) const {
    if (kWholeUnits && keys % kUnitTokens != 0) return false;
    return keys >= 0 && keys <= int64_t{arguments_.table_width} * arguments_.block_tokens;
  }
  __device__ int batch_entry(int cache_head) const { return kv_heads_.quotient(cache_head); }
  __device__ int query(const DecodeEntry& entry, int row) const { return group_.quotient(entry.pack * kPackRows + row); }

  const PagedAttentionArguments& arguments_;
  const bool ahead_;
  const Divisor kv_heads_;
  const Divisor group_;
};

// All units of all entries.
struct DecodeTotals {
  int64_t units;
  int32_t entries;
};

class DecodeSpans {
 public:
  DecodeSpans() = default;
  // There are at most as many spans as units. A split costs as much as `split_cost` units. The spans of some fewer blocks
  // may end where entries of one length do, so that none has a second split. That is done where it is cheaper by this cost,
  // or with `of_entries` where at most 1/16 of the blocks then have no span.
  __device__ DecodeSpans(const DecodeTotals& totals, int blocks, int split_cost, bool of_entries)
      : count_(static_cast<int>(min(totals.units, int64_t{blocks}))), split_cost_(split_cost) {
    if (totals.entries > 0 && totals.entries <= count_) {
      const int fewer = count_ - count_ % totals.entries;
      if (of_entries ? (count_ - fewer) * 16 <= count_ : totals.units * count_ < row_length(totals) * fewer) {
        count_ = fewer;
        split_cost_ = 0;
      }
    }
    length_ = row_length(totals);
  }

  __device__ int count() const { return count_; }
  __device__ int split_cost() const { return split_cost_; }
  __device__ int64_t row_length(const DecodeTotals& totals) const { return totals.units + int64_t{totals.entries} * split_cost_; }
  __device__ int64_t begin(int span) const { return length_ * span / count_; }
  // ((place + 1) * count - 1) / length. A division of such integers takes a thousand cycles, for which the end of a split
  // would wait; with few spans a quotient of floats is off by at most one.
  __device__ int span_of(int64_t place) const {
    const int64_t number = (place + 1) * count_ - 1;
    const int guess = static_cast<int>(__fdividef(static_cast<float>(number), static_cast<float>(length_)));
    const int64_t rest = number - guess * length_;
    return rest < 0 ? guess - 1 : rest >= length_ ? guess + 1 : guess;
  }

 private:
  int count_ = 0;
  int split_cost_ = 0;
  int64_t length_ = 0;  // of the row, in units
};

}  // namespace kv
