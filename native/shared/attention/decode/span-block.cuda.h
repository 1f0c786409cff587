// A thread block of decode attention: it finds its span of the work, computes the split of each entry there, and merges
// partial results. What kind of cache it reads is up to `Cache`. Device code.
#pragma once

#include "ptx/dependent-launch.cuda.h"
#include "runtime/fault.h"
#include "shared/attention/decode/merge-partials.cuda.h"
#include "shared/attention/decode/work-spans.cuda.h"

namespace kv {

// What the kernels of decode attention take.
template <typename Arguments>
struct DecodeParameters {
  Arguments arguments;
  const int32_t* value_table;  // names the blocks of values, like the arguments' block table those of keys
  unsigned* arrivals;
  void* partials;
  FaultSink faults;
};

// How a thread block shares its work out, in shared memory.
template <int kWarps>
struct SpanShared {
  DecodeTotals warp_totals[kWarps];
  DecodeSpans spans;
  DecodeEntry entry;
  DecodeHead head;  // of the entry, as it was when the work was shared out
  int32_t keys;     // of the head, as they were read last
  int64_t first_unit;  // of the entry, in the row of all work
  bool finishes_entry;
};

// `Cache` has the constants kWarps, kPackRows, kUnitTokens, kHeadDim, kSplitCost and kSpansOfEntries (DecodeSpans), the types
// Parameters, Entries, Shared, which holds a `span` and the `partials` of the warps, Writer, whose objects
// are made of the arguments and are called like write_row, and
//   Cache(parameters, shared);
//   stream_split(entry, head, first_unit, end_unit): computes the partial of each warp over these units. All threads call
//     it, and all partials are written when it returns;
//   prefetch(row_start, first_token, head): starts to bring into L2 what is read first. The kernel ahead may still write
//     there. `row_start` is where the head's part of the block table begins.
template <typename Cache>
class SpanBlock {
 public:
  using Parameters = typename Cache::Parameters;
  using Shared = typename Cache::Shared;
  using Entries = typename Cache::Entries;
  using Partial = DecodePartial<Cache::kPackRows, Cache::kHeadDim>;

  __device__ SpanBlock(const Parameters& parameters, Shared& shared)
      : parameters_(parameters),
        shared_(shared),
        entries_(parameters.arguments),
        cache_(parameters, shared),
        begin_cache_head_(min(cache_heads_of_thread() * static_cast<int>(threadIdx.x), entries_.cache_heads())),
        end_cache_head_(min(begin_cache_head_ + cache_heads_of_thread(), entries_.cache_heads())) {}

  __device__ void run() {
    if (!prepare() || begin_ == end_) return;
    const DecodeSpans& spans = shared_.span.spans;
    const int span = blockIdx.x;
    int64_t begin = begin_;
    const int64_t end = end_;
    DecodeEntry entry = shared_.span.entry;
    DecodeHead head = shared_.span.head;
    head.keys = shared_.span.keys;
    int64_t first_unit = shared_.span.first_unit;
    DecodeResults<Cache::kPackRows, Cache::kHeadDim, Cache::kWarps, Entries, typename Cache::Writer> results(
        entries_, shared_.partials, {parameters_.arguments}, parameters_.arrivals, parameters_.partials,
        shared_.span.finishes_entry);
    // A span may end before the units of the entry that it reaches.
#pragma unroll 1
    while (first_unit < end) {
      const int64_t entry_end = first_unit + entries_.units(head);
      const int64_t split_end = min(entry_end, end);
      cache_.stream_split(entry, head, static_cast<int>(max(begin - first_unit, int64_t{0})),
                          static_cast<int>(split_end - first_unit));
      // Every split has a different sum of span and entry, so the sum is the number of its partial.
      const int first_span = spans.span_of(first_unit);
      results.contribute(entry, head, span + entry.index, first_span + entry.index,
                         spans.span_of(entry_end - 1) - first_span + 1);
      if (split_end == end) break;
      __syncthreads();  // the next split overwrites the partials
      begin = entry_end;
      first_unit = entry_end + spans.split_cost();
      entries_.advance(entry, head);
    }
  }

 private:
  static constexpr int kThreads = 32 * Cache::kWarps;
  static constexpr int kFewUnits = 8;  // a span of so few units gains nothing by prefetching

  __device__ int cache_heads_of_thread() const { return (entries_.cache_heads() + kThreads - 1) / kThreads; }

  // Shares the work out early, while the kernels ahead may still change the tables, and again if they have or if a thread
  // has several cache heads. In between it prefetches into L2 the keys and values that are read first, although they may
  // still be written. False if rows or slots are out of range. Both times run the same instructions: in a step each kernel
  // must fetch its own from L2 anew.
  __device__ bool prepare() {
#pragma unroll 1
    for (bool early = true;; early = false) {
      const bool inside = share_out(Entries(parameters_.arguments, early), early || blockIdx.x != 0 ? nullptr : &parameters_.faults);
      if (!early) return inside;
      if (inside && begin_ < end_) prefetch();
      ptx::wait_for_previous_kernel();
      if (cache_heads_of_thread() == 1 && __syncthreads_and(inside && unchanged())) return true;
    }
  }

  // Whether the tables still give what was shared out. The number of keys may have changed within a unit.
  __device__ bool unchanged() {
    if (first_lookup_ >= 0 && threadIdx.x % 32 == 0) {
      ptx::prefetch_line(parameters_.arguments.block_table + first_lookup_);
      ptx::prefetch_line(parameters_.value_table + first_lookup_);
    }
    if (begin_cache_head_ == end_cache_head_) return true;
    const bool same = entries_.renew(begin_cache_head_, head_);
    if (begin_cache_head_ == shared_.span.entry.cache_head) shared_.span.keys = head_.keys;
    return same;
  }

  // Writes to shared memory the entry where this thread block's span begins. False if rows or slots are out of range.
  __device__ bool share_out(const Entries& entries, const FaultSink* faults) {
    DecodeTotals own = {0, 0};  // of this thread's cache heads
    bool inside = true;
    for (int cache_head = begin_cache_head_; cache_head < end_cache_head_; ++cache_head) {
      DecodeHead head;
      inside = entries.read_head(cache_head, faults, head);
      if (!inside) break;
      if (cache_head == begin_cache_head_) head_ = head;
      own.units += int64_t{entries.packs(head)} * entries.units(head);
      own.entries += entries.packs(head);
    }
    if (!__syncthreads_and(inside)) return false;
    DecodeTotals sum = own;
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
      const DecodeTotals before = {__shfl_up_sync(0xffffffffu, sum.units, distance),
                                   __shfl_up_sync(0xffffffffu, sum.entries, distance)};
      if (threadIdx.x % 32 >= distance) sum = {sum.units + before.units, sum.entries + before.entries};
    }
    if (threadIdx.x % 32 == 31) shared_.span.warp_totals[threadIdx.x / 32] = sum;
    __syncthreads();
    DecodeTotals totals = {0, 0};
    for (int warp = 0; warp < Cache::kWarps; ++warp) {
      const DecodeTotals other = shared_.span.warp_totals[warp];
      if (warp < static_cast<int>(threadIdx.x) / 32) sum = {sum.units + other.units, sum.entries + other.entries};
      totals = {totals.units + other.units, totals.entries + other.entries};
    }
    const DecodeSpans spans(totals, static_cast<int>(gridDim.x), Cache::kSplitCost, Cache::kSpansOfEntries);
    if (threadIdx.x == 0) shared_.span.spans = spans;
    const int span = blockIdx.x;
    begin_ = span < spans.count() ? spans.begin(span) : 0;
    end_ = span < spans.count() ? spans.begin(span + 1) : 0;
    if (begin_ < end_) {
      const DecodeTotals before = {sum.units - own.units, sum.entries - own.entries};
      find_entry(entries, spans, spans.row_length(before), spans.row_length(sum), before.entries);
    }
    __syncthreads();
    return true;
  }

  // If the span begins among this thread's cache heads, which lie from `begin` to before `end` in the row, writes the entry
  // where it begins to shared memory.
  __device__ void find_entry(const Entries& entries, const DecodeSpans& spans, int64_t begin, int64_t end, int begin_entry) {
    if (begin_ < begin || begin_ >= end) return;
    DecodeEntry entry = {begin_entry, begin_cache_head_, 0};
    DecodeHead head = head_;
    for (;;) {
      const int64_t length = int64_t{entries.packs(head)} * (entries.units(head) + spans.split_cost());
      // Units that were counted early may have changed since.
      if (begin_ < begin + length || entry.cache_head + 1 == end_cache_head_) break;
      begin += length;
      entry.index += entries.packs(head);
      entries.read_head(++entry.cache_head, nullptr, head);
    }
    const int length = entries.units(head) + spans.split_cost();
    entry.pack = static_cast<int>((begin_ - begin) / length);
    entry.index += entry.pack;
    shared_.span.entry = entry;
    shared_.span.head = head;
    shared_.span.keys = head.keys;
    shared_.span.first_unit = begin + int64_t{entry.pack} * length + spans.split_cost();
  }

  // Prefetches the first units of the span into L2, unless the span is short.
  __device__ void prefetch() {
    const DecodeHead head = shared_.span.head;
    const int64_t first_token = max(begin_ - shared_.span.first_unit, int64_t{0}) * Cache::kUnitTokens;
    if (first_token >= head.keys) return;
    const PagedBatch& batch = parameters_.arguments;
    const int64_t row_start = entries_.table_row(shared_.span.entry.cache_head, head.slot) * batch.table_width;
    first_lookup_ = row_start + first_token / batch.block_tokens;
    if (end_ - begin_ > kFewUnits) cache_.prefetch(row_start, first_token, head);
  }

  const Parameters& parameters_;
  Shared& shared_;
  const Entries entries_;
  Cache cache_;
  const int begin_cache_head_;  // of this thread's share
  const int end_cache_head_;
  int64_t begin_ = 0;  // this thread block's span
  int64_t end_ = 0;
  // What was found while the kernels ahead still ran.
  DecodeHead head_ = {};  // of this thread's first cache head
  int64_t first_lookup_ = -1;  // index in the block table, or -1
};

}  // namespace kv
