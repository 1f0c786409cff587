// Decode attention: one query of a sequence, or a few, against all its keys. Each key and value is read once, and the
// bandwidth of these reads bounds the speed.
//
// The queries and query heads that share a kv head are the rows of one tensor-core product. All keys are cut into
// equal spans (work-spans.cuda.h). Each warp of a thread block streams its own tokens of every unit, through its own
// ring of asynchronous copies. Warps therefore wait for each other only at the end of a split. The partials of warps,
// and then of thread blocks, are merged in f32. The thread block that finishes an entry last merges those of the
// thread blocks.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/decode-attention/decode-attention.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "runtime/check.cuda.h"
#include "runtime/fault.h"
#include "shared/attention/decode/merge-partials.cuda.h"
#include "shared/attention/decode/work-spans.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/attention/warp-attention.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kPackRows = 16;    // rows of one mma
constexpr int kStepTokens = 16;  // of each warp
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kUnitTokens = kStepTokens * kWarps;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kUnitsAhead = 2;  // units of a span that are prefetched while the kernel ahead still runs
constexpr int kFewUnits = 8;    // a span of so few units gains nothing by prefetching

using Entries = DecodeEntries<kUnitTokens, kPackRows>;
using EntriesAhead = DecodeEntries<kUnitTokens, kPackRows, true>;

template <int kHeadDim>
using Partial = DecodePartial<kPackRows, kHeadDim>;

// Stages of a warp's ring. More stages only make the memory's queues longer.
template <int kHeadDim>
constexpr int kStages = kHeadDim == 128 ? 2 : 3;

template <typename Element, int kHeadDim>
struct Stage {
  Element keys[kStepTokens][kHeadDim];
  Element values[kStepTokens][kHeadDim];
};

template <typename Element, int kHeadDim>
struct SharedStorage {
  union {
    Stage<Element, kHeadDim> ring[kWarps][kStages<kHeadDim>];
    Partial<kHeadDim> partials[kWarps];
  };
  longlong2 warp_totals[kWarps];  // units and entries
  int64_t units;
  DecodeEntry entry;
  DecodeHead head;  // of the entry
  int64_t first_unit_of_entry;
  bool finishes_entry;
};

struct Parameters {
  PagedAttentionArguments arguments;
  const int32_t* value_table;
  unsigned* arrivals;
  void* partials;
  FaultSink faults;
};

// ---- Streaming: one warp's tokens of a split. ----

template <typename Element, int kHeadDim>
class WarpStream {
 public:
  __device__ WarpStream(const Parameters& parameters, Stage<Element, kHeadDim> (&ring)[kStages<kHeadDim>],
                        int64_t table_row, int key_count, int first_unit, int end_unit)
      : arguments_(parameters.arguments),
        faults_(parameters.faults),
        ring_(ring),
        key_table_(arguments_.block_table + table_row * arguments_.table_width),
        value_table_(parameters.value_table + table_row * arguments_.table_width),
        key_count_(key_count),
        lane_(threadIdx.x % 32),
        next_token_(first_unit * kUnitTokens + threadIdx.x / 32 * kStepTokens),
        end_token_(end_unit * kUnitTokens) {
    look_up();
    for (int stage = 0; stage < kStages<kHeadDim> - 1; ++stage) request();
  }

  // Waits for the oldest requested step and requests one more.
  __device__ Stage<Element, kHeadDim>& next() {
    ptx::async_copy_wait<kStages<kHeadDim> - 2>();
    __syncwarp();  // also: no lane reads the stage any more that the request overwrites
    request();
    Stage<Element, kHeadDim>& stage = ring_[read_stage_];
    read_stage_ = read_stage_ + 1 == kStages<kHeadDim> ? 0 : read_stage_ + 1;
    return stage;
  }

 private:
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kRowsAtOnce = 32 / kChunks;

  __device__ void look_up() {
    if (next_token_ >= min(key_count_, end_token_)) return;
    const int entry = next_token_ / arguments_.block_tokens;
    next_key_block_ = key_table_[entry];
    next_value_block_ = value_table_[entry];
  }

  // A block that is not in the pool is not read.
  __device__ bool exists(int block) const {
    if (block >= 0 && block < arguments_.block_count) return true;
    report_fault(faults_, PagedFault::block_out_of_range, block);
    return false;
  }

  __device__ void request() {
    if (next_token_ < end_token_) {
      const int chunk = lane_ % kChunks;
      const int64_t in_block =
          int64_t{next_token_ % arguments_.block_tokens} * arguments_.token_stride + chunk * 8;
      const int key_rows = next_token_ < key_count_ && exists(next_key_block_) ? key_count_ - next_token_ : 0;
      const int value_rows = next_token_ < key_count_ && exists(next_value_block_) ? key_count_ - next_token_ : 0;
      const Element* keys = static_cast<const Element*>(arguments_.keys) +
                            (key_rows > 0 ? next_key_block_ : 0) * arguments_.block_stride + in_block;
      const Element* values = static_cast<const Element*>(arguments_.values) +
                              (value_rows > 0 ? next_value_block_ : 0) * arguments_.block_stride + in_block;
      Stage<Element, kHeadDim>& stage = ring_[write_stage_];
#pragma unroll
      for (int i = 0; i < kStepTokens; i += kRowsAtOnce) {
        const int row = i + lane_ / kChunks;
        const int64_t offset = row * arguments_.token_stride;
        ptx::async_copy_16(swizzled_chunk(stage.keys, row, chunk), keys + offset, row < key_rows, policy_);
        ptx::async_copy_16(swizzled_chunk(stage.values, row, chunk), values + offset, row < value_rows, policy_);
      }
      next_token_ += kUnitTokens;
      look_up();
    }
    ptx::async_copy_commit();
    write_stage_ = write_stage_ + 1 == kStages<kHeadDim> ? 0 : write_stage_ + 1;
  }

  const PagedAttentionArguments& arguments_;
  const FaultSink& faults_;
  Stage<Element, kHeadDim> (&ring_)[kStages<kHeadDim>];
  const int32_t* key_table_;
  const int32_t* value_table_;
  const int key_count_;
  const int lane_;
  const uint64_t policy_ = ptx::evict_first_policy();
  int next_token_;
  const int end_token_;
  int next_key_block_ = 0;
  int next_value_block_ = 0;
  int write_stage_ = 0;
  int read_stage_ = 0;
};

// ---- A thread block computes the splits of its span. ----

template <typename Element, int kHeadDim>
class Block {
 public:
  __device__ Block(const Parameters& parameters, SharedStorage<Element, kHeadDim>& shared)
      : parameters_(parameters),
        arguments_(parameters.arguments),
        shared_(shared),
        entries_(parameters.arguments),
        begin_cache_head_(min(cache_heads_of_thread() * static_cast<int>(threadIdx.x), entries_.cache_heads())),
        end_cache_head_(min(begin_cache_head_ + cache_heads_of_thread(), entries_.cache_heads())) {}

  __device__ void run() {
    prepare();
    ptx::wait_for_previous_kernel();
    if (!__syncthreads_and(unchanged())) {
      if (!share_out(entries_, blockIdx.x == 0 ? &parameters_.faults : nullptr)) return;
    }
    if (begin_ == end_) return;
    const DecodeSpans spans(shared_.units, gridDim.x);
    const int span = blockIdx.x;
    int64_t unit = begin_;
    const int64_t end = end_;
    DecodeEntry entry = shared_.entry;
    int64_t entry_begin = shared_.first_unit_of_entry;
    const auto partial_of = [partials = shared_.partials](int warp) -> Partial<kHeadDim>& { return partials[warp]; };
    DecodeResults<Element, kPackRows, kHeadDim, kWarps, Entries, decltype(partial_of)> results(
        arguments_, entries_, partial_of, parameters_.arrivals, parameters_.partials, shared_.finishes_entry);
    for (;;) {
      const int64_t entry_end = entry_begin + entries_.units(entry.cache_head);
      const int64_t split_end = min(entry_end, end);
      stream_split(entry, static_cast<int>(unit - entry_begin),
                     static_cast<int>(split_end - entry_begin));
      if (unit == entry_begin && split_end == entry_end) {
        results.write_output(entry);
      } else {
        // Every split has a different sum of span and entry, so the sum is the number of its partial.
        const int first_span = spans.span_of(entry_begin);
        results.contribute(entry, span + entry.index, first_span + entry.index,
                           spans.span_of(entry_end - 1) - first_span + 1);
      }
      if (split_end == end) break;
      __syncthreads();  // the ring overwrites the partials
      unit = split_end;
      entry_begin = entry_end;
      entry = entries_.next(entry);
    }
  }

 private:
  __device__ int cache_heads_of_thread() const { return (entries_.cache_heads() + kThreads - 1) / kThreads; }

  // Shares the work out early, while the kernels ahead may still change the tables. Also prefetches into L2 the keys
  // and values that are read first, although they may still be written.
  __device__ void prepare() {
    prepared_ = cache_heads_of_thread() == 1 && share_out(EntriesAhead(arguments_), nullptr);
    if (prepared_ && begin_ < end_) prefetch();
  }

  // Whether the tables still give what was prepared.
  __device__ bool unchanged() const {
    if (!prepared_) return false;
    if (first_lookup_ >= 0 && threadIdx.x % 32 == 0) {
      ptx::prefetch_line(arguments_.block_table + first_lookup_);
      ptx::prefetch_line(parameters_.value_table + first_lookup_);
    }
    DecodeHead head = head_;
    return begin_cache_head_ == end_cache_head_ || entries_.renew(begin_cache_head_, head);
  }

  // Writes to shared memory how many units all entries have, and the entry that holds the first unit of this thread
  // block's span. False if rows or slots are out of range.
  template <typename AnyEntries>
  __device__ bool share_out(const AnyEntries& entries, const FaultSink* faults) {
    longlong2 own = {0, 0};  // of this thread's cache heads: units and entries
    bool inside = true;
    for (int cache_head = begin_cache_head_; cache_head < end_cache_head_; ++cache_head) {
      DecodeHead head;
      inside = entries.read_head(cache_head, faults, head);
      if (!inside) break;
      if (cache_head == begin_cache_head_) head_ = head;
      own.x += int64_t{entries.packs(head)} * entries.units(head);
      own.y += entries.packs(head);
    }
    if (!__syncthreads_and(inside)) return false;
    longlong2 sum = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const longlong2 before = {__shfl_up_sync(0xffffffffu, sum.x, distance),
                                __shfl_up_sync(0xffffffffu, sum.y, distance)};
      if (threadIdx.x % 32 >= distance) sum = {sum.x + before.x, sum.y + before.y};
    }
    if (threadIdx.x % 32 == 31) shared_.warp_totals[threadIdx.x / 32] = sum;
    __syncthreads();
    int64_t total = 0;
    for (int warp = 0; warp < kWarps; ++warp) {
      const longlong2 other = shared_.warp_totals[warp];
      if (warp < static_cast<int>(threadIdx.x) / 32) sum = {sum.x + other.x, sum.y + other.y};
      total += other.x;
    }
    if (threadIdx.x == 0) shared_.units = total;
    const DecodeSpans spans(total, gridDim.x);
    const int span = blockIdx.x;
    begin_ = span < spans.count() ? spans.first_unit(span) : 0;
    end_ = span < spans.count() ? spans.first_unit(span + 1) : 0;
    if (begin_ < end_) find_entry(entries, begin_, sum.x - own.x, sum.x, static_cast<int>(sum.y - own.y));
    __syncthreads();
    return true;
  }

  // If `unit` belongs to this thread's cache heads, writes its entry and the entry's first unit to shared memory. The
  // cache heads have the units begin .. end - 1.
  template <typename AnyEntries>
  __device__ void find_entry(const AnyEntries& entries, int64_t unit, int64_t begin, int64_t end, int begin_entry) {
    if (unit < begin || unit >= end) return;
    DecodeEntry entry = {begin_entry, begin_cache_head_, 0};
    DecodeHead head = head_;
    for (;;) {
      const int64_t units = int64_t{entries.packs(head)} * entries.units(head);
      if (unit < begin + units) break;
      begin += units;
      entry.index += entries.packs(head);
      entries.read_head(++entry.cache_head, nullptr, head);
    }
    entry.pack = static_cast<int>((unit - begin) / entries.units(head));
    entry.index += entry.pack;
    shared_.entry = entry;
    shared_.head = head;
    shared_.first_unit_of_entry = begin + int64_t{entry.pack} * entries.units(head);
  }

  // Prefetches the first units of the span into L2, unless the span is short.
  __device__ void prefetch() {
    const DecodeHead head = shared_.head;
    if (head.keys == 0) return;
    const int64_t row_start = entries_.table_row(shared_.entry.cache_head, head.slot) * arguments_.table_width;
    const int64_t first_token = (begin_ - shared_.first_unit_of_entry) * kUnitTokens;
    first_lookup_ = row_start + first_token / arguments_.block_tokens;
    if (end_ - begin_ <= kFewUnits || arguments_.token_stride != kHeadDim) return;
    const int piece_tokens = arguments_.block_tokens % kUnitTokens == 0 ? kUnitTokens : kStepTokens;
    const int piece = threadIdx.x / 2;
    const int64_t token = first_token + piece * piece_tokens;
    if (piece * piece_tokens >= kUnitsAhead * kUnitTokens || token >= head.keys) return;
    const bool of_keys = threadIdx.x % 2 == 0;
    const int32_t* table = of_keys ? arguments_.block_table : parameters_.value_table;
    const int block = __ldcg(table + row_start + token / arguments_.block_tokens);
    if (block < 0 || block >= arguments_.block_count) return;
    ptx::prefetch(static_cast<const Element*>(of_keys ? arguments_.keys : arguments_.values) +
                      block * arguments_.block_stride + token % arguments_.block_tokens * kHeadDim,
                  piece_tokens * kHeadDim * sizeof(Element));
  }

  // Computes the partial of each warp over these units, in shared memory.
  __device__ void stream_split(const DecodeEntry& entry, int first_unit, int end_unit) {
    const int warp = threadIdx.x / 32;
    WarpStream<Element, kHeadDim> stream(parameters_, shared_.ring[warp], entries_.table_row(entry.cache_head),
                                         entries_.key_count(entry.cache_head), first_unit, end_unit);
    WarpAttention<Element, kHeadDim, kStepTokens> attention(arguments_.scale);
    set_rows(entry, attention);
    const int fewest_visible = entries_.visible_keys(entry, 0);
    for (int unit = first_unit; unit < end_unit; ++unit) {
      auto& stage = stream.next();
      const int first_key = unit * kUnitTokens + warp * kStepTokens;
      attention.step(stage.keys, stage.values, first_key, first_key + kStepTokens > fewest_visible);
    }
    ptx::async_copy_wait<0>();
    __syncthreads();
    write_partial(attention, entries_.rows(entry), shared_.partials[warp]);
    __syncthreads();
  }

  // Rows beyond the pack are zeros, and their results are not read.
  __device__ void set_rows(const DecodeEntry& entry,
                           WarpAttention<Element, kHeadDim, kStepTokens>& attention) {
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % 32 / 4 + 8 * half;
      if (row < entries_.rows(entry)) {
        attention.set_row(half,
                          static_cast<const Element*>(arguments_.query) +
                              entries_.token(entry, row) * arguments_.query_token_stride +
                              entries_.query_head(entry, row) * arguments_.query_head_stride,
                          entries_.visible_keys(entry, row));
      } else {
        attention.set_row(half, nullptr, 0);
      }
    }
  }

  __device__ void write_partial(WarpAttention<Element, kHeadDim, kStepTokens>& attention, int rows,
                                Partial<kHeadDim>& partial) {
    attention.finish();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      if (row >= rows) continue;
      if (lane % 4 == 0) {
        partial.reference[row] = attention.softmax().reference(half);
        partial.sum[row] = attention.softmax().sum(half);
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        *reinterpret_cast<float2*>(&partial.output[row][i * 8 + lane % 4 * 2]) = attention.output(half, i);
      }
    }
  }

  const Parameters& parameters_;
  const PagedAttentionArguments& arguments_;
  SharedStorage<Element, kHeadDim>& shared_;
  const Entries entries_;
  const int begin_cache_head_;  // of this thread's share
  const int end_cache_head_;
  int64_t begin_ = 0;  // this thread block's span
  int64_t end_ = 0;
  // What was prepared while the kernels ahead still ran.
  bool prepared_ = false;
  DecodeHead head_ = {};  // of this thread's first cache head
  int64_t first_lookup_ = -1;  // index in the block table, or -1
};

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_attention_kernel(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kHeadDim>*>(shared_memory);
  ptx::let_next_kernel_start();
  Block<Element, kHeadDim>(parameters, shared).run();
}

// ---- Launch ----

cudaError_t count_blocks(int* blocks) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = multiprocessors * kBlocksPerMultiprocessor;
  return error;
}

// An upper bound: only the device knows how many queries each entry has.
size_t count_entries(const PagedAttentionArguments& arguments) {
  const int group = arguments.query_heads / arguments.kv_heads;
  return arguments.kv_heads * (size_t{1} * arguments.query_tokens * group / kPackRows + arguments.batch);
}

template <typename Element, int kHeadDim>
Status launch(const Parameters& parameters, cudaStream_t stream) {
  int blocks = 0;
  cudaError_t error = count_blocks(&blocks);
  const auto kernel = decode_attention_kernel<Element, kHeadDim>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Element, kHeadDim>);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return cuda_status(error);
  return launch_overlapped(kernel, blocks, kThreads, kSharedBytes, stream, parameters);
}

template <typename Element>
Status launch_for_head_dim(const Parameters& parameters, cudaStream_t stream) {
  return parameters.arguments.head_dim == 64 ? launch<Element, 64>(parameters, stream)
                                             : launch<Element, 128>(parameters, stream);
}

}  // namespace

Status decode_attention_memory(const PagedAttentionArguments& arguments, DecodeAttentionMemory* memory) {
  int blocks = 0;
  const Status status = cuda_status(count_blocks(&blocks));
  memory->counter_bytes = count_entries(arguments) * sizeof(unsigned);
  memory->workspace_bytes = (blocks + count_entries(arguments)) * sizeof(Partial<128>);
  return status;
}

Status decode_attention(const PagedAttentionArguments& arguments, const int32_t* value_table, void* counters,
                        void* workspace, FaultSink faults, cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, kDecodeBlockMultiple)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core decode attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const Parameters parameters{arguments, value_table, static_cast<unsigned*>(counters), workspace, faults};
  return arguments.cache_dtype == DType::f16 ? launch_for_head_dim<__half>(parameters, stream)
                                             : launch_for_head_dim<__nv_bfloat16>(parameters, stream);
}

}  // namespace kv::cuda
