// Decode attention: one query of a sequence, or a few, against all its keys, bound by the bandwidth of
// reading each key and value once.
//
// The queries and query heads that share a kv head form the rows of one tensor-core product. All keys are cut
// into equal spans (decode-attention-split.h). Each warp of a block streams its own tokens of every unit
// through its own ring of asynchronous copies, so that warps never wait for each other until a segment ends.
// The partial outputs of warps, then of blocks, are merged in f32; whichever block finishes an entry last
// merges the blocks'.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/attention-tensor-cores.h"
#include "kernels/decode-attention/decode-attention-merge.h"
#include "kernels/decode-attention/decode-attention-split.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/overlapped-launch.cuda.h"
#include "kernels/warp-attention.h"
#include "ptx/async-copy.h"
#include "runtime/cuda-check.h"

namespace kv::cuda {
namespace {

constexpr int kPackRows = 16;    // rows of one mma
constexpr int kStepTokens = 16;  // of one warp
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kUnitTokens = kStepTokens * kWarps;
constexpr int kBlocksPerMultiprocessor = 2;

using Entries = DecodeEntries<kUnitTokens, kPackRows>;

template <int kHeadDim>
using Partial = DecodePartial<kPackRows, kHeadDim>;

// Of a warp's ring. More of them only make the memory's queues longer.
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
  longlong2 warp_totals[kWarps];  // units, entries
  DecodeEntry entry;
  int64_t first_unit_of_entry;
  bool finishes_entry;
};

struct Parameters {
  PagedAttentionArguments arguments;
  const int32_t* value_table;
  unsigned* arrivals;
  void* partials;
};

// ---- Streaming: one warp's tokens of a segment. ----

template <typename Element, int kHeadDim>
class WarpStream {
 public:
  __device__ WarpStream(const PagedAttentionArguments& arguments,
                        Stage<Element, kHeadDim> (&ring)[kStages<kHeadDim>], const int32_t* key_table,
                        const int32_t* value_table, int key_count, int first_unit, int end_unit)
      : arguments_(arguments),
        ring_(ring),
        key_table_(key_table),
        value_table_(value_table),
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
    __syncwarp();  // also: every lane is done with the stage that the request overwrites
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

  __device__ void request() {
    if (next_token_ < end_token_) {
      const int chunk = lane_ % kChunks;
      const int64_t in_block =
          int64_t{next_token_ % arguments_.block_tokens} * arguments_.token_stride + chunk * 8;
      const Element* keys =
          static_cast<const Element*>(arguments_.keys) + next_key_block_ * arguments_.block_stride + in_block;
      const Element* values =
          static_cast<const Element*>(arguments_.values) + next_value_block_ * arguments_.block_stride + in_block;
      Stage<Element, kHeadDim>& stage = ring_[write_stage_];
#pragma unroll
      for (int i = 0; i < kStepTokens; i += kRowsAtOnce) {
        const int row = i + lane_ / kChunks;
        const bool present = next_token_ + row < key_count_;
        const int64_t offset = present ? row * arguments_.token_stride : 0;
        ptx::async_copy_16(swizzled_chunk(stage.keys, row, chunk), keys + offset, present, policy_);
        ptx::async_copy_16(swizzled_chunk(stage.values, row, chunk), values + offset, present, policy_);
      }
      next_token_ += kUnitTokens;
      look_up();
    }
    ptx::async_copy_commit();
    write_stage_ = write_stage_ + 1 == kStages<kHeadDim> ? 0 : write_stage_ + 1;
  }

  const PagedAttentionArguments& arguments_;
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

// ---- A block: works through the segments of its span. ----

template <typename Element, int kHeadDim>
class Block {
 public:
  __device__ Block(const Parameters& parameters, SharedStorage<Element, kHeadDim>& shared)
      : parameters_(parameters),
        arguments_(parameters.arguments),
        shared_(shared),
        entries_(parameters.arguments),
        begin_cache_head_(cache_heads_of_thread() * threadIdx.x),
        spans_(count_units(), gridDim.x) {}

  __device__ void run() {
    const int span = blockIdx.x;
    if (span >= spans_.count()) return;
    int64_t unit = spans_.first_unit(span);
    const int64_t end = spans_.first_unit(span + 1);
    find_entry(unit);
    DecodeEntry entry = shared_.entry;
    int64_t entry_begin = shared_.first_unit_of_entry;
    const auto partial_of = [partials = shared_.partials](int warp) -> Partial<kHeadDim>& { return partials[warp]; };
    DecodeResults<Element, kPackRows, kHeadDim, kWarps, Entries, decltype(partial_of)> results(
        arguments_, entries_, partial_of, parameters_.arrivals, parameters_.partials, shared_.finishes_entry);
    for (;;) {
      const int64_t entry_end = entry_begin + entries_.units(entry.cache_head);
      const int64_t segment_end = min(entry_end, end);
      stream_segment(entry, static_cast<int>(unit - entry_begin),
                     static_cast<int>(segment_end - entry_begin));
      if (unit == entry_begin && segment_end == entry_end) {
        results.write_output(entry);
      } else {
        // No two segments share the sum of span and entry.
        const int first_span = spans_.span_of(entry_begin);
        results.contribute(entry, span + entry.index, first_span + entry.index,
                           spans_.span_of(entry_end - 1) - first_span + 1);
      }
      if (segment_end == end) break;
      __syncthreads();  // the partials give way to the ring
      unit = segment_end;
      entry_begin = entry_end;
      entry = entries_.next(entry);
    }
  }

 private:
  __device__ int cache_heads_of_thread() const { return (entries_.cache_heads() + kThreads - 1) / kThreads; }

  // Of all entries. Each thread remembers where the units and entries of its own cache heads begin and end.
  __device__ int64_t count_units() {
    const int end_cache_head = min(begin_cache_head_ + cache_heads_of_thread(), entries_.cache_heads());
    longlong2 own = {0, 0};
    for (int cache_head = begin_cache_head_; cache_head < end_cache_head; ++cache_head) {
      const int packs = entries_.packs(cache_head);
      own.x += packs * entries_.units(cache_head);
      own.y += packs;
    }
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
    end_unit_ = sum.x;
    begin_unit_ = sum.x - own.x;
    begin_entry_ = static_cast<int>(sum.y - own.y);
    return total;
  }

  // Leaves the entry that holds `unit`, and the entry's first unit, in shared memory.
  __device__ void find_entry(int64_t unit) {
    if (begin_unit_ <= unit && unit < end_unit_) {
      DecodeEntry entry = {begin_entry_, begin_cache_head_, 0};
      while (entries_.packs(entry.cache_head) == 0) ++entry.cache_head;
      int64_t first = begin_unit_;
      for (int units = entries_.units(entry.cache_head); first + units <= unit;) {
        first += units;
        entry = entries_.next(entry);
        units = entries_.units(entry.cache_head);
      }
      shared_.entry = entry;
      shared_.first_unit_of_entry = first;
    }
    __syncthreads();
  }

  // Leaves each warp's partial of these units in shared memory.
  __device__ void stream_segment(const DecodeEntry& entry, int first_unit, int end_unit) {
    const int warp = threadIdx.x / 32;
    const int64_t row_start = entries_.table_row(entry.cache_head) * arguments_.table_width;
    WarpStream<Element, kHeadDim> stream(arguments_, shared_.ring[warp], arguments_.block_table + row_start,
                                         parameters_.value_table + row_start,
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
    write_partial(attention, shared_.partials[warp]);
    __syncthreads();
  }

  // Rows past the pack's are zeros; their results are not read.
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

  __device__ void write_partial(WarpAttention<Element, kHeadDim, kStepTokens>& attention,
                                Partial<kHeadDim>& partial) {
    attention.finish();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
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
  int begin_entry_;
  int64_t begin_unit_;
  int64_t end_unit_;
  const DecodeSpans spans_;
};

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_attention_kernel(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kHeadDim>*>(shared_memory);
  ptx::follow_previous_kernel();
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

// At most: where the queries lie is known to the device only.
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
                        void* workspace, cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, kDecodeBlockMultiple)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core decode attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const Parameters parameters{arguments, value_table, static_cast<unsigned*>(counters), workspace};
  return arguments.cache_dtype == DType::f16 ? launch_for_head_dim<__half>(parameters, stream)
                                             : launch_for_head_dim<__nv_bfloat16>(parameters, stream);
}

}  // namespace kv::cuda
