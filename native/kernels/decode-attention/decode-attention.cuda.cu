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
#include "kernels/decode-attention/decode-attention-split.h"
#include "kernels/decode-attention/decode-attention.cuda.h"
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

// Unnormalised output of some of an entry's keys: weights are exp2(score - reference).
template <int kHeadDim>
struct Partial {
  float reference[kPackRows];
  float sum[kPackRows];
  float output[kPackRows][kHeadDim];
};

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
  unsigned* arrivals;  // [entry], blocks that have written their partial; 0 before and after
  void* partials;      // [span + entry]: no two segments share this sum, and an entry's are neighbours
};

// ---- Streaming: one warp's tokens of a segment. ----

template <typename Element, int kHeadDim>
class WarpStream {
 public:
  __device__ WarpStream(const PagedAttentionArguments& arguments,
                        Stage<Element, kHeadDim> (&ring)[kStages<kHeadDim>], const int32_t* table,
                        int key_count, int first_unit, int end_unit)
      : arguments_(arguments),
        ring_(ring),
        table_(table),
        key_count_(key_count),
        lane_(threadIdx.x % 32),
        next_token_(first_unit * kUnitTokens + threadIdx.x / 32 * kStepTokens),
        end_token_(end_unit * kUnitTokens) {
    next_block_ = look_up();
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

  __device__ int look_up() const {
    return next_token_ < min(key_count_, end_token_) ? table_[next_token_ / arguments_.block_tokens] : 0;
  }

  __device__ void request() {
    if (next_token_ < end_token_) {
      const int chunk = lane_ % kChunks;
      const int64_t start = int64_t{next_block_} * arguments_.block_stride +
                            int64_t{next_token_ % arguments_.block_tokens} * arguments_.token_stride +
                            chunk * 8;
      const Element* keys = static_cast<const Element*>(arguments_.keys) + start;
      const Element* values = static_cast<const Element*>(arguments_.values) + start;
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
      next_block_ = look_up();
    }
    ptx::async_copy_commit();
    write_stage_ = write_stage_ + 1 == kStages<kHeadDim> ? 0 : write_stage_ + 1;
  }

  const PagedAttentionArguments& arguments_;
  Stage<Element, kHeadDim> (&ring_)[kStages<kHeadDim>];
  const int32_t* table_;
  const int key_count_;
  const int lane_;
  const uint64_t policy_ = ptx::evict_first_policy();
  int next_token_;
  const int end_token_;
  int next_block_;
  int write_stage_ = 0;
  int read_stage_ = 0;
};

// ---- Merging partials. ----

// Four neighbouring dims of one row.
class Merged {
 public:
  template <int kHeadDim>
  __device__ void add(const Partial<kHeadDim>& partial, int row, int dim) {
    const float other = partial.reference[row];
    const float4 output = *reinterpret_cast<const float4*>(&partial.output[row][dim]);
    const float reference = fmaxf(reference_, other);
    const float offset = reference == -INFINITY ? 0.0f : reference;
    const float own_factor = ptx::exp2_approximate(reference_ - offset);
    const float other_factor = ptx::exp2_approximate(other - offset);
    sum_ = sum_ * own_factor + partial.sum[row] * other_factor;
    output_.x = output_.x * own_factor + output.x * other_factor;
    output_.y = output_.y * own_factor + output.y * other_factor;
    output_.z = output_.z * own_factor + output.z * other_factor;
    output_.w = output_.w * own_factor + output.w * other_factor;
    reference_ = reference;
  }

  template <int kHeadDim>
  __device__ void write(Partial<kHeadDim>& partial, int row, int dim) const {
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
  float reference_ = -INFINITY;
  float sum_ = 0.0f;
  float4 output_ = {0.0f, 0.0f, 0.0f, 0.0f};
};

// Each warp merges every kWarps-th of the partials into its own.
template <int kHeadDim>
__device__ void merge_blocks(const Partial<kHeadDim>* partials, int count, int rows,
                             Partial<kHeadDim>& destination) {
  constexpr int kRowsAtOnce = 4;
  const int dim = threadIdx.x % 32 * 4;
  if (dim >= kHeadDim) return;
  for (int first_row = 0; first_row < rows; first_row += kRowsAtOnce) {
    Merged merged[kRowsAtOnce];
#pragma unroll 4
    for (int i = threadIdx.x / 32; i < count; i += kWarps) {
#pragma unroll
      for (int row = 0; row < kRowsAtOnce; ++row)
        merged[row].add(partials[i], min(first_row + row, rows - 1), dim);
    }
#pragma unroll
    for (int row = 0; row < kRowsAtOnce; ++row)
      merged[row].write(destination, min(first_row + row, rows - 1), dim);
  }
}

// Calls use(merged, row, dim) with what the warps' partials add up to.
template <int kHeadDim, typename Use>
__device__ void merge_warps(const Partial<kHeadDim> (&partials)[kWarps], int rows, const Use& use) {
  for (int i = threadIdx.x; i < rows * kHeadDim / 4; i += kThreads) {
    const int row = i / (kHeadDim / 4);
    const int dim = i % (kHeadDim / 4) * 4;
    Merged merged;
    for (const Partial<kHeadDim>& partial : partials) merged.add(partial, row, dim);
    use(merged, row, dim);
  }
}

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
    for (;;) {
      const int64_t entry_end = entry_begin + entries_.units(entry.cache_head);
      const int64_t segment_end = min(entry_end, end);
      stream_segment(entry, static_cast<int>(unit - entry_begin),
                     static_cast<int>(segment_end - entry_begin));
      if (unit == entry_begin && segment_end == entry_end) {
        write_output(entry);
      } else {
        contribute(entry, entry_begin, entry_end);
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
    const int32_t* table =
        arguments_.block_table + entries_.table_row(entry.cache_head) * arguments_.table_width;
    WarpStream<Element, kHeadDim> stream(arguments_, shared_.ring[warp], table,
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

  // Publishes the block's partial of an entry that other blocks work on too; the last to do so merges them.
  __device__ void contribute(const DecodeEntry& entry, int64_t entry_begin, int64_t entry_end) {
    auto* partials = static_cast<Partial<kHeadDim>*>(parameters_.partials) + entry.index;
    const int rows = entries_.rows(entry);
    merge_warps(shared_.partials, rows, [&](const Merged& merged, int row, int dim) {
      merged.write(partials[blockIdx.x], row, dim);
    });
    const int first_span = spans_.span_of(entry_begin);
    const int contributions = spans_.span_of(entry_end - 1) - first_span + 1;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const unsigned arrived = atomicAdd(&parameters_.arrivals[entry.index], 1u) + 1;
      shared_.finishes_entry = arrived == static_cast<unsigned>(contributions);
      if (shared_.finishes_entry) parameters_.arrivals[entry.index] = 0;
    }
    __syncthreads();
    if (!shared_.finishes_entry) return;
    __threadfence();
    merge_blocks(&partials[first_span], contributions, rows, shared_.partials[threadIdx.x / 32]);
    __syncthreads();
    write_output(entry);
  }

  __device__ void write_output(const DecodeEntry& entry) {
    merge_warps(shared_.partials, entries_.rows(entry), [&](const Merged& merged, int row, int dim) {
      const int64_t token = entries_.token(entry, row);
      const int head = entries_.query_head(entry, row);
      merged.write_mean(static_cast<Element*>(arguments_.output) + token * arguments_.output_token_stride +
                        head * arguments_.output_head_stride + dim);
      if (arguments_.log_sum_exp != nullptr && dim == 0) {
        arguments_.log_sum_exp[token * arguments_.query_heads + head] = merged.log_sum_exp();
      }
    });
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
Status launch(const PagedAttentionArguments& arguments, void* counters, void* workspace,
              cudaStream_t stream) {
  const Parameters parameters{arguments, static_cast<unsigned*>(counters), workspace};
  int blocks = 0;
  cudaError_t error = count_blocks(&blocks);
  const auto kernel = decode_attention_kernel<Element, kHeadDim>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Element, kHeadDim>);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return cuda_status(error);
  kernel<<<blocks, kThreads, kSharedBytes, stream>>>(parameters);
  return launch_status();
}

template <typename Element>
Status launch_for_head_dim(const PagedAttentionArguments& arguments, void* counters, void* workspace,
                           cudaStream_t stream) {
  return arguments.head_dim == 64 ? launch<Element, 64>(arguments, counters, workspace, stream)
                                  : launch<Element, 128>(arguments, counters, workspace, stream);
}

}  // namespace

Status decode_attention_memory(const PagedAttentionArguments& arguments, DecodeAttentionMemory* memory) {
  int blocks = 0;
  const Status status = cuda_status(count_blocks(&blocks));
  memory->counter_bytes = count_entries(arguments) * sizeof(unsigned);
  memory->workspace_bytes = (blocks + count_entries(arguments)) * sizeof(Partial<128>);
  return status;
}

Status decode_attention(const PagedAttentionArguments& arguments, void* counters, void* workspace,
                        cudaStream_t stream) {
  if (!fits_tensor_cores(arguments, kDecodeBlockMultiple)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core decode attention");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  return arguments.cache_dtype == DType::f16
             ? launch_for_head_dim<__half>(arguments, counters, workspace, stream)
             : launch_for_head_dim<__nv_bfloat16>(arguments, counters, workspace, stream);
}

}  // namespace kv::cuda
