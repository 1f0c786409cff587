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

#include <algorithm>

#include "kernels/decode-attention/decode-attention.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "shared/attention/decode/span-block.cuda.h"
#include "shared/attention/decode/span-launch.cuda.h"
#include "shared/attention/tensor-core-shapes.h"
#include "shared/attention/warp-attention.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kPackRows = 16;  // rows of one mma
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kStages = 2;  // of a warp's ring. More stages only make the memory's queues longer.
constexpr int kUnitsAhead = 2;  // units of a span that are prefetched while the kernel ahead still runs

using Parameters = DecodeParameters<PagedAttentionArguments>;

// Tokens of each warp's step: 4 KiB of keys, and of values.
template <int kHeadDim>
constexpr int kStepTokens = 2048 / kHeadDim;
template <int kHeadDim>
constexpr int kUnitTokens = kStepTokens<kHeadDim> * kWarps;

template <int kHeadDim>
using Partial = DecodePartial<kPackRows, kHeadDim>;

template <typename Element, int kHeadDim>
struct Stage {
  Element keys[kStepTokens<kHeadDim>][kHeadDim];
  Element values[kStepTokens<kHeadDim>][kHeadDim];
};

template <typename Element, int kHeadDim>
struct SharedStorage {
  union {
    Stage<Element, kHeadDim> ring[kWarps][kStages];
    Partial<kHeadDim> partials[kWarps];
  };
  SpanShared<kWarps> span;
};

// ---- Streaming: one warp's tokens of a split. ----

template <typename Element, int kHeadDim>
class WarpStream {
 public:
  __device__ WarpStream(const Parameters& parameters, Stage<Element, kHeadDim> (&ring)[kStages],
                        int64_t table_row, int key_count, int first_unit, int end_unit)
      : arguments_(parameters.arguments),
        faults_(parameters.faults),
        ring_(ring),
        key_table_(arguments_.block_table + table_row * arguments_.table_width),
        value_table_(parameters.value_table + table_row * arguments_.table_width),
        key_count_(key_count),
        part_row_(threadIdx.x % 32 / kLanesOfPart * kDecodeBlockMultiple),
        own_row_(threadIdx.x % kLanesOfPart / kChunks),
        own_chunk_(threadIdx.x % kChunks),
        own_offset_(own_row_ * arguments_.token_stride + own_chunk_ * 8),
        next_token_(first_unit * kUnitTokens<kHeadDim> + threadIdx.x / 32 * kStepTokens<kHeadDim> + part_row_),
        next_entry_(next_token_ / arguments_.block_tokens),
        next_in_block_(next_token_ % arguments_.block_tokens),
        end_token_(end_unit * kUnitTokens<kHeadDim>) {
    // The compiler would compute them anew for every step.
    asm volatile("" : "+r"(end_token_), "+r"(key_count_), "+l"(own_offset_), "+l"(key_table_), "+l"(value_table_));
    look_up();
    for (int stage = 0; stage < kStages - 1; ++stage) request();
  }

  // Waits for the oldest requested step and requests one more.
  __device__ Stage<Element, kHeadDim>& next() {
    ptx::async_copy_wait<kStages - 2>();
    __syncwarp();  // also: no lane reads the stage any more that the request overwrites
    request();
    Stage<Element, kHeadDim>& stage = ring_[read_stage_];
    read_stage_ = read_stage_ + 1 == kStages ? 0 : read_stage_ + 1;
    return stage;
  }

 private:
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kLanesOfPart = 32 * kDecodeBlockMultiple / kStepTokens<kHeadDim>;  // a part lies in one block
  static constexpr int kRowsAtOnce = kLanesOfPart / kChunks;

  __device__ void look_up() {
    if (next_token_ >= min(key_count_, end_token_)) return;
    next_key_block_ = key_table_[next_entry_];
    next_value_block_ = value_table_[next_entry_];
  }

  // Without a division, which the copies behind it would wait for.
  __device__ void advance() {
    next_token_ += kUnitTokens<kHeadDim>;
    next_in_block_ += kUnitTokens<kHeadDim>;
    for (; next_in_block_ >= arguments_.block_tokens; next_in_block_ -= arguments_.block_tokens) ++next_entry_;
  }

  // A block that is not in the pool is not read.
  __device__ bool exists(int block) const {
    if (block >= 0 && block < arguments_.block_count) return true;
    report_fault(faults_, PagedFault::block_out_of_range, block);
    return false;
  }

  __device__ void request() {
    if (next_token_ < end_token_) {
      const int rows = key_count_ - next_token_;
      const int key_rows = rows > 0 && exists(next_key_block_) ? rows : 0;
      const int value_rows = rows > 0 && exists(next_value_block_) ? rows : 0;
      const int64_t offset = own_offset_ + next_in_block_ * arguments_.token_stride;
      const Element* keys = static_cast<const Element*>(arguments_.keys) + offset +
                            (key_rows > 0 ? next_key_block_ : 0) * arguments_.block_stride;
      const Element* values = static_cast<const Element*>(arguments_.values) + offset +
                              (value_rows > 0 ? next_value_block_ : 0) * arguments_.block_stride;
      Stage<Element, kHeadDim>& stage = ring_[write_stage_];
#pragma unroll
      for (int i = 0; i < kDecodeBlockMultiple; i += kRowsAtOnce) {
        const int row = i + own_row_;
        ptx::async_copy_16(swizzled_chunk(stage.keys, part_row_ + row, own_chunk_), keys, row < key_rows, policy_);
        ptx::async_copy_16(swizzled_chunk(stage.values, part_row_ + row, own_chunk_), values, row < value_rows, policy_);
        keys += kRowsAtOnce * arguments_.token_stride;
        values += kRowsAtOnce * arguments_.token_stride;
      }
      advance();
      look_up();
    }
    ptx::async_copy_commit();
    write_stage_ = write_stage_ + 1 == kStages ? 0 : write_stage_ + 1;
  }

  const PagedAttentionArguments& arguments_;
  const FaultSink& faults_;
  Stage<Element, kHeadDim> (&ring_)[kStages];
  const int32_t* key_table_;
  const int32_t* value_table_;
  int key_count_;
  const int part_row_;  // the first row of the part that this lane copies some of
  const int own_row_;   // of each kRowsAtOnce rows of the part, and the chunk of it, that this lane copies
  const int own_chunk_;
  int64_t own_offset_;
  const uint64_t policy_ = ptx::evict_first_policy();
  int next_token_;
  int next_entry_;  // of the tables
  int next_in_block_;
  int end_token_;
  int next_key_block_ = 0;
  int next_value_block_ = 0;
  int write_stage_ = 0;
  int read_stage_ = 0;
};

// ---- A thread block streams a split. ----

template <typename Element, int kDim>
class DenseCache {
 public:
  static constexpr int kWarps = kv::cuda::kWarps;
  static constexpr int kPackRows = kv::cuda::kPackRows;
  static constexpr int kUnitTokens = kv::cuda::kUnitTokens<kDim>;
  static constexpr int kHeadDim = kDim;
  static constexpr int kSplitCost = 2;
  static constexpr bool kSpansOfEntries = false;
  using Parameters = cuda::Parameters;
  using Entries = DecodeEntries<kUnitTokens, kPackRows>;
  using Shared = SharedStorage<Element, kDim>;

  using Writer = MeanWriter<Element>;

  __device__ DenseCache(const Parameters& parameters, Shared& shared)
      : parameters_(parameters), arguments_(parameters.arguments), shared_(shared), entries_(parameters.arguments) {}

  __device__ void prefetch(int64_t row_start, int64_t first_token, const DecodeHead& head) const {
    if (arguments_.token_stride != kDim) return;
    const int piece_tokens = arguments_.block_tokens % kUnitTokens == 0 ? kUnitTokens : kDecodeBlockMultiple;
    const int piece = threadIdx.x / 2;
    const int64_t token = first_token + piece * piece_tokens;
    if (piece * piece_tokens >= kUnitsAhead * kUnitTokens || token >= head.keys) return;
    const bool of_keys = threadIdx.x % 2 == 0;
    const int32_t* table = of_keys ? arguments_.block_table : parameters_.value_table;
    const int block = __ldcg(table + row_start + token / arguments_.block_tokens);
    if (block < 0 || block >= arguments_.block_count) return;
    ptx::prefetch(static_cast<const Element*>(of_keys ? arguments_.keys : arguments_.values) +
                      block * arguments_.block_stride + token % arguments_.block_tokens * kDim,
                  piece_tokens * kDim * sizeof(Element));
  }

  __device__ void stream_split(const DecodeEntry& entry, const DecodeHead& head, int first_unit, int end_unit) {
    const int warp = threadIdx.x / 32;
    WarpStream<Element, kDim> stream(parameters_, shared_.ring[warp],
                                     entries_.table_row(entry.cache_head, head.slot), head.keys, first_unit, end_unit);
    WarpAttention<Element, kDim, kStepTokens<kDim>> attention(arguments_.scale);
    set_rows(entry, head, attention);
    const int fewest_visible = entries_.visible_keys(head, entry, 0);
    for (int unit = first_unit; unit < end_unit; ++unit) {
      auto& stage = stream.next();
      const int first_key = unit * kUnitTokens + warp * kStepTokens<kDim>;
      attention.step(stage.keys, stage.values, first_key, first_key + kStepTokens<kDim> > fewest_visible);
    }
    ptx::async_copy_wait<0>();
    __syncthreads();
    write_partial(attention, entries_.rows(head, entry), shared_.partials[warp]);
    __syncthreads();
  }

 private:
  // Rows beyond the pack are zeros, and their results are not read.
  __device__ void set_rows(const DecodeEntry& entry, const DecodeHead& head,
                           WarpAttention<Element, kDim, kStepTokens<kDim>>& attention) {
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % 32 / 4 + 8 * half;
      if (row < entries_.rows(head, entry)) {
        attention.set_row(half,
                          static_cast<const Element*>(arguments_.query) +
                              entries_.token(head, entry, row) * arguments_.query_token_stride +
                              entries_.query_head(entry, row) * arguments_.query_head_stride,
                          entries_.visible_keys(head, entry, row));
      } else {
        attention.set_row(half, nullptr, 0);
      }
    }
  }

  __device__ void write_partial(WarpAttention<Element, kDim, kStepTokens<kDim>>& attention, int rows,
                                Partial<kDim>& partial) {
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
      for (int i = 0; i < kDim / 8; ++i) {
        *reinterpret_cast<float2*>(&partial.output[row][i * 8 + lane % 4 * 2]) = attention.output(half, i);
      }
    }
  }

  const Parameters& parameters_;
  const PagedAttentionArguments& arguments_;
  Shared& shared_;
  const Entries entries_;
};

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_attention_kernel(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kHeadDim>*>(shared_memory);
  ptx::let_next_kernel_start();
  SpanBlock<DenseCache<Element, kHeadDim>>(parameters, shared).run();
}

// ---- Launch ----

// With so much shared memory no more than kBlocksPerMultiprocessor fit into a multiprocessor: with more there, others would
// have none.
Status find_least_shared_bytes(int& bytes) {
  int device = 0;
  int of_multiprocessor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  bytes = of_multiprocessor / (kBlocksPerMultiprocessor + 1) + 1;
  return cuda_status(error);
}

template <typename Element, int kHeadDim>
Status launch(const Parameters& parameters, cudaStream_t stream) {
  int shared_bytes = sizeof(SharedStorage<Element, kHeadDim>);
  if (kHeadDim == 64) {  // the registers of 128 dims let no more in
    int least = 0;
    const Status found = find_least_shared_bytes(least);
    if (!found.ok()) return found;
    shared_bytes = std::max(shared_bytes, least);
  }
  return launch_spans(decode_attention_kernel<Element, kHeadDim>, kBlocksPerMultiprocessor, kThreads, shared_bytes, stream,
                      parameters);
}

template <typename Element>
Status launch_for_head_dim(const Parameters& parameters, cudaStream_t stream) {
  return parameters.arguments.head_dim == 64 ? launch<Element, 64>(parameters, stream)
                                             : launch<Element, 128>(parameters, stream);
}

}  // namespace

Status decode_attention_memory(const PagedAttentionArguments& arguments, DecodeAttentionMemory* memory) {
  return span_memory(arguments, kBlocksPerMultiprocessor, kPackRows, sizeof(Partial<128>), memory);
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
