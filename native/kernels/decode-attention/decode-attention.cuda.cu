// Decode attention: one query a sequence against all its keys, bound by the bandwidth of reading each key and
// value once.
//
// The query heads that share a kv head form the 16 rows of one tensor-core product. The keys of all sequences
// are cut into equal spans (decode-split.h). Each warp of a block streams its own tokens of every unit through
// its own ring of asynchronous copies, so that warps never wait for each other until a segment ends; partial
// outputs, maxima and sums of warps and of blocks are merged in f32 by the same code, blocks by whichever
// finishes an entry last.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "kernels/decode-attention/decode-attention.cuda.h"
#include "kernels/decode-attention/decode-split.h"
#include "kernels/online-softmax.h"
#include "ptx/async-copy.h"
#include "ptx/matrix-load.h"
#include "ptx/mma.h"

namespace kv::cuda {
namespace {

constexpr int kPackHeads = 16;   // rows of one mma
constexpr int kStepTokens = 16;  // of one warp
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kUnitTokens = kStepTokens * kWarps;
#ifndef KV_STAGES
#define KV_STAGES 3
#endif
constexpr int kStages = KV_STAGES;
constexpr int kBlocksPerMultiprocessor = 2;

using Split = DecodeSplit<kUnitTokens, kPackHeads>;

// Unnormalised output of some of an entry's keys: weights are exp2(score - reference).
template <int kHeadDim>
struct Partial {
  float reference[kPackHeads];
  float sum[kPackHeads];
  float output[kPackHeads][kHeadDim];
};

template <typename Element, int kHeadDim>
struct Stage {
  Element keys[kStepTokens][kHeadDim];
  Element values[kStepTokens][kHeadDim];
};

template <typename Element, int kHeadDim>
struct SharedStorage {
  union {
    Stage<Element, kHeadDim> ring[kWarps][kStages];
    Partial<kHeadDim> partials[kWarps];
  };
  int64_t scan[kWarps];
  int64_t first_unit_of_entry;
  int entry;
  bool finishes_entry;
};

struct Parameters {
  PagedAttentionArguments arguments;
  unsigned* arrivals;  // [entry], 0 between launches
  void* partials;      // [span, 2]: the span's first segment, and its last
};

// The swizzle that keeps 16-byte chunks of eight neighbouring rows in different banks.
template <typename Element, int kHeadDim>
__device__ Element* chunk_at(Element (&rows)[kStepTokens][kHeadDim], int row, int chunk) {
  return &rows[row][(chunk ^ (row % 8)) * 8];
}

// ---- Streaming: one warp's tokens of a segment. ----

template <typename Element, int kHeadDim>
class WarpStream {
 public:
  __device__ WarpStream(const PagedAttentionArguments& arguments, Stage<Element, kHeadDim> (&ring)[kStages],
                        const int32_t* table, int key_count, int first_unit, int end_unit)
      : arguments_(arguments),
        ring_(ring),
        table_(table),
        key_count_(key_count),
        lane_(threadIdx.x % 32),
        next_token_(first_unit * kUnitTokens + threadIdx.x / 32 * kStepTokens),
        end_token_(end_unit * kUnitTokens) {
    next_block_ = look_up();
    for (int stage = 0; stage < kStages - 1; ++stage) request();
  }

  // Waits for the oldest requested step and requests one more.
  __device__ Stage<Element, kHeadDim>& next() {
    ptx::async_copy_wait<kStages - 2>();
    __syncwarp();  // also: every lane is done with the stage that the request overwrites
    request();
    Stage<Element, kHeadDim>& stage = ring_[read_stage_];
    read_stage_ = read_stage_ + 1 == kStages ? 0 : read_stage_ + 1;
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
                            int64_t{next_token_ % arguments_.block_tokens} * arguments_.token_stride + chunk * 8;
      const Element* keys = static_cast<const Element*>(arguments_.keys) + start;
      const Element* values = static_cast<const Element*>(arguments_.values) + start;
      Stage<Element, kHeadDim>& stage = ring_[write_stage_];
#pragma unroll
      for (int i = 0; i < kStepTokens; i += kRowsAtOnce) {
        const int row = i + lane_ / kChunks;
        const bool present = next_token_ + row < key_count_;
        const int64_t offset = present ? row * arguments_.token_stride : 0;
        ptx::async_copy_16(chunk_at(stage.keys, row, chunk), keys + offset, present);
        ptx::async_copy_16(chunk_at(stage.values, row, chunk), values + offset, present);
      }
      next_token_ += kUnitTokens;
      next_block_ = look_up();
    }
    ptx::async_copy_commit();
    write_stage_ = write_stage_ + 1 == kStages ? 0 : write_stage_ + 1;
  }

  const PagedAttentionArguments& arguments_;
  Stage<Element, kHeadDim> (&ring_)[kStages];
  const int32_t* table_;
  const int key_count_;
  const int lane_;
  int next_token_;
  const int end_token_;
  int next_block_;
  int write_stage_ = 0;
  int read_stage_ = 0;
};

// ---- One segment: scores, weights and outputs of one warp's tokens. ----

template <typename Element, int kHeadDim>
class WarpAttention {
 public:
  __device__ WarpAttention(const PagedAttentionArguments& arguments, const Element* query, int heads)
      : softmax_(arguments.scale), lane_(threadIdx.x % 32) {
    // Rows past the pack's heads are zero queries; their results are not read.
#pragma unroll
    for (int i = 0; i < kHeadDim / 4; ++i) {
      const int row = lane_ / 4 + i % 2 * 8;
      const int column = i / 4 * 16 + i / 2 % 2 * 8 + lane_ % 4 * 2;
      query_[i / 4][i % 4] =
          row < heads ? *reinterpret_cast<const uint32_t*>(query + row * arguments.query_head_stride + column) : 0;
    }
  }

  // `keys_left`: from the step's first token to the entry's last.
  __device__ void step(Stage<Element, kHeadDim>& stage, int keys_left) {
    float scores[8] = {};
    const int matrix = lane_ / 8;
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      uint32_t keys[4];
      ptx::load_matrices(keys, chunk_at(stage.keys, matrix / 2 * 8 + lane_ % 8, 2 * i + matrix % 2));
      ptx::mma_m16n8k16<Element>(&scores[0], query_[i], keys[0], keys[1]);
      ptx::mma_m16n8k16<Element>(&scores[4], query_[i], keys[2], keys[3]);
    }
    if (keys_left < kStepTokens) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i / 4 * 8 + lane_ % 4 * 2 + i % 2 >= keys_left) scores[i] = -INFINITY;
      }
    }
    float correction[2];
    if (softmax_.observe(scores, correction)) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) output_[i] *= correction[i / 2 % 2];
    }
    softmax_.weigh<0, 8>(scores);
    const uint32_t weights[4] = {ptx::pack<Element>(scores[0], scores[1]), ptx::pack<Element>(scores[2], scores[3]),
                                 ptx::pack<Element>(scores[4], scores[5]), ptx::pack<Element>(scores[6], scores[7])};
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      uint32_t values[4];
      ptx::load_matrices_transposed(values, chunk_at(stage.values, matrix % 2 * 8 + lane_ % 8, 2 * i + matrix / 2));
      ptx::mma_m16n8k16<Element>(&output_[8 * i], weights, values[0], values[1]);
      ptx::mma_m16n8k16<Element>(&output_[8 * i + 4], weights, values[2], values[3]);
    }
  }

  __device__ void write(Partial<kHeadDim>& partial) {
    softmax_.finish();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane_ / 4 + 8 * half;
      if (lane_ % 4 == 0) {
        partial.reference[row] = softmax_.reference(half);
        partial.sum[row] = softmax_.sum(half);
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        *reinterpret_cast<float2*>(&partial.output[row][i * 8 + lane_ % 4 * 2]) =
            make_float2(output_[4 * i + 2 * half], output_[4 * i + 2 * half + 1]);
      }
    }
  }

 private:
  OnlineSoftmax softmax_;
  const int lane_;
  uint32_t query_[kHeadDim / 16][4];
  float output_[kHeadDim / 2] = {};
};

// ---- Merging partials. ----

// Where the partials to merge lie: `first`, then `rest`, every `stride`.
template <int kHeadDim>
struct PartialList {
  const Partial<kHeadDim>* first;
  const Partial<kHeadDim>* rest;
  int stride;
  int count;

  __device__ const Partial<kHeadDim>& operator[](int i) const { return i == 0 ? *first : rest[int64_t{i - 1} * stride]; }
};

// Four neighbouring dims of one row over all partials.
struct Merged {
  float reference = -INFINITY;
  float sum = 0.0f;
  float4 output = {0.0f, 0.0f, 0.0f, 0.0f};
};

template <int kHeadDim>
__device__ Merged merge(const PartialList<kHeadDim>& partials, int row, int dim) {
  Merged merged;
  for (int i = 0; i < partials.count; ++i) merged.reference = fmaxf(merged.reference, partials[i].reference[row]);
  if (merged.reference == -INFINITY) return merged;
#pragma unroll 8
  for (int i = 0; i < partials.count; ++i) {
    const Partial<kHeadDim>& partial = partials[i];
    const float weight = ptx::exp2_approximate(partial.reference[row] - merged.reference);
    const float4 output = *reinterpret_cast<const float4*>(&partial.output[row][dim]);
    merged.sum += weight * partial.sum[row];
    merged.output.x += weight * output.x;
    merged.output.y += weight * output.y;
    merged.output.z += weight * output.z;
    merged.output.w += weight * output.w;
  }
  return merged;
}

template <typename Element, int kHeadDim>
__device__ void write_output(const PagedAttentionArguments& arguments, const Split& split, int entry,
                             const PartialList<kHeadDim>& partials) {
  const int64_t query_row = arguments.query_start[split.batch_entry(entry)];
  for (int i = threadIdx.x; i < split.heads(entry) * kHeadDim / 4; i += kThreads) {
    const int row = i / (kHeadDim / 4);
    const int dim = i % (kHeadDim / 4) * 4;
    const int head = split.first_head(entry) + row;
    const Merged merged = merge(partials, row, dim);
    const float normalizer = OnlineSoftmax::normalizer(merged.sum);
    Element* output = static_cast<Element*>(arguments.output) + query_row * arguments.output_token_stride +
                      head * arguments.output_head_stride + dim;
    *reinterpret_cast<uint2*>(output) =
        make_uint2(ptx::pack<Element>(merged.output.x * normalizer, merged.output.y * normalizer),
                   ptx::pack<Element>(merged.output.z * normalizer, merged.output.w * normalizer));
    if (arguments.log_sum_exp != nullptr && dim == 0) {
      arguments.log_sum_exp[query_row * arguments.query_heads + head] =
          OnlineSoftmax::log_sum_exp(merged.reference, merged.sum);
    }
  }
}

template <int kHeadDim>
__device__ void write_partial(int heads, const PartialList<kHeadDim>& partials, Partial<kHeadDim>* destination) {
  for (int i = threadIdx.x; i < heads * kHeadDim / 4; i += kThreads) {
    const int row = i / (kHeadDim / 4);
    const int dim = i % (kHeadDim / 4) * 4;
    const Merged merged = merge(partials, row, dim);
    *reinterpret_cast<float4*>(&destination->output[row][dim]) = merged.output;
    if (dim == 0) {
      destination->reference[row] = merged.reference;
      destination->sum[row] = merged.sum;
    }
  }
}

// ---- The block: finds its span, then works through the span's segments. ----

// Adds up all entries' units and finds the entry that holds this block's first unit.
template <typename Shared>
__device__ DecodeSpans find_span(const Split& split, Shared& shared) {
  const int each = (split.entries() + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, split.entries());
  const int end = min(begin + each, split.entries());
  int64_t own = 0;
  for (int entry = begin; entry < end; ++entry) own += split.units_of(entry);
  int64_t inclusive = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t before = __shfl_up_sync(0xffffffffu, inclusive, distance);
    if (threadIdx.x % 32 >= distance) inclusive += before;
  }
  if (threadIdx.x % 32 == 31) shared.scan[threadIdx.x / 32] = inclusive;
  __syncthreads();
  int64_t total = 0;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < static_cast<int>(threadIdx.x) / 32) inclusive += shared.scan[warp];
    total += shared.scan[warp];
  }
  // No more spans than units: none is empty.
  const DecodeSpans spans{total, static_cast<int>(min(total, int64_t{gridDim.x}))};
  const int64_t wanted = spans.first_unit(blockIdx.x);
  int64_t first = inclusive - own;
  if (first <= wanted && wanted < inclusive) {
    int entry = begin;
    for (int units = split.units_of(entry); first + units <= wanted; units = split.units_of(entry)) {
      first += units;
      ++entry;
    }
    shared.entry = entry;
    shared.first_unit_of_entry = first;
  }
  __syncthreads();
  return spans;
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_attention_kernel(const __grid_constant__ Parameters parameters) {
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<SharedStorage<Element, kHeadDim>*>(shared_memory);
  auto* partials = static_cast<Partial<kHeadDim>*>(parameters.partials);
  const PagedAttentionArguments& arguments = parameters.arguments;
  const Split split(arguments);
  const DecodeSpans spans = find_span(split, shared);
  if (blockIdx.x >= spans.count) return;
  const int64_t span_begin = spans.first_unit(blockIdx.x);
  const int64_t span_end = spans.first_unit(blockIdx.x + 1);
  const int warp = threadIdx.x / 32;

  int64_t entry_begin = shared.first_unit_of_entry;
  int entry = shared.entry;
  for (int64_t unit = span_begin; unit < span_end; ++entry) {
    const int64_t table_row = split.table_row(entry);
    const int key_count = arguments.key_counts[table_row];
    const int64_t entry_end = entry_begin + split.units(key_count);
    const int64_t segment_end = min(entry_end, span_end);
    const int first_unit = static_cast<int>(unit - entry_begin);
    const int end_unit = static_cast<int>(segment_end - entry_begin);

    WarpStream<Element, kHeadDim> stream(arguments, shared.ring[warp], arguments.block_table + table_row * arguments.table_width,
                                         key_count, first_unit, end_unit);
    const Element* query = static_cast<const Element*>(arguments.query) +
                           int64_t{arguments.query_start[split.batch_entry(entry)]} * arguments.query_token_stride +
                           split.first_head(entry) * arguments.query_head_stride;
    WarpAttention<Element, kHeadDim> attention(arguments, query, split.heads(entry));
    for (int step = first_unit; step < end_unit; ++step) {
      attention.step(stream.next(), key_count - step * kUnitTokens - warp * kStepTokens);
    }
    ptx::async_copy_wait<0>();
    __syncthreads();
    attention.write(shared.partials[warp]);
    __syncthreads();

    const PartialList<kHeadDim> warps{&shared.partials[0], &shared.partials[1], 1, kWarps};
    if (unit == entry_begin && segment_end == entry_end) {
      write_output<Element>(arguments, split, entry, warps);
    } else {
      write_partial(split.heads(entry), warps, &partials[2 * blockIdx.x + (unit == span_begin ? 0 : 1)]);
      const int first_span = spans.span_of(entry_begin);
      const int last_span = spans.span_of(entry_end - 1);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        const unsigned contributions = last_span - first_span + 1;
        shared.finishes_entry = atomicAdd(&parameters.arrivals[entry], 1u) + 1 == contributions;
        if (shared.finishes_entry) parameters.arrivals[entry] = 0;
      }
      __syncthreads();
      if (shared.finishes_entry) {
        __threadfence();
        // A span that begins before the entry meets it in its last segment, all later ones in their first.
        const int in_last_segment = spans.first_unit(first_span) < entry_begin ? 1 : 0;
        const PartialList<kHeadDim> blocks{&partials[2 * first_span + in_last_segment], &partials[2 * (first_span + 1)], 2,
                                           last_span - first_span + 1};
        write_output<Element>(arguments, split, entry, blocks);
      }
    }
    __syncthreads();  // the ring is overwritten next
    unit = segment_end;
    entry_begin = entry_end;
  }
}

// ---- Launch ----

Status invalid(const std::string& message) { return Status::failure(StatusCode::invalid_value, "decode-attention: " + message); }

Status cuda_status(cudaError_t error) {
  if (error == cudaSuccess) return Status::success();
  return Status::failure(StatusCode::device_fault, std::string("decode-attention: ") + cudaGetErrorString(error));
}

cudaError_t count_blocks(int* blocks) {
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = multiprocessors * kBlocksPerMultiprocessor;
  return error;
}

size_t arrival_bytes(const PagedAttentionArguments& arguments) {
  const int group = arguments.query_heads / arguments.kv_heads;
  const size_t entries = size_t{1} * arguments.batch * arguments.kv_heads * ((group + kPackHeads - 1) / kPackHeads);
  return (entries * sizeof(unsigned) + 255) / 256 * 256;
}

template <typename Element, int kHeadDim>
Status launch(const PagedAttentionArguments& arguments, void* workspace, cudaStream_t stream) {
  const Parameters parameters{arguments, static_cast<unsigned*>(workspace),
                              static_cast<unsigned char*>(workspace) + arrival_bytes(arguments)};
  int blocks = 0;
  cudaError_t error = count_blocks(&blocks);
  const auto kernel = decode_attention_kernel<Element, kHeadDim>;
  constexpr int kSharedBytes = sizeof(SharedStorage<Element, kHeadDim>);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return cuda_status(error);
  kernel<<<blocks, kThreads, kSharedBytes, stream>>>(parameters);
  return cuda_status(cudaGetLastError());
}

template <typename Element>
Status launch_for_head_dim(const PagedAttentionArguments& arguments, void* workspace, cudaStream_t stream) {
  switch (arguments.head_dim) {
    case 64:
      return launch<Element, 64>(arguments, workspace, stream);
    case 128:
      return launch<Element, 128>(arguments, workspace, stream);
    default:
      return invalid("head_dim is " + std::to_string(arguments.head_dim) + "; this kernel takes 64 or 128");
  }
}

}  // namespace

Status decode_attention_workspace_bytes(const PagedAttentionArguments& arguments, size_t* bytes) {
  int blocks = 0;
  const Status status = cuda_status(count_blocks(&blocks));
  *bytes = arrival_bytes(arguments) + size_t{2} * blocks * sizeof(Partial<128>);
  return status;
}

Status decode_attention(const PagedAttentionArguments& arguments, void* workspace, cudaStream_t stream) {
  if (arguments.query_dtype != arguments.cache_dtype || arguments.query_dtype != arguments.output_dtype) {
    return invalid("queries, cache and output must have one dtype; convert them to the cache's");
  }
  if (arguments.block_tokens < kStepTokens || arguments.block_tokens % kStepTokens != 0) {
    return invalid("block_tokens is " + std::to_string(arguments.block_tokens) + "; it must be a multiple of 16");
  }
  if (!(arguments.scale > 0.0f)) return invalid("scale must be positive");
  if (arguments.batch == 0) return Status::success();
  switch (arguments.query_dtype) {
    case DType::f16:
      return launch_for_head_dim<__half>(arguments, workspace, stream);
    case DType::bf16:
      return launch_for_head_dim<__nv_bfloat16>(arguments, workspace, stream);
    default:
      return invalid("the dtype must be f16 or bf16");
  }
}

}  // namespace kv::cuda
