// Decode attention over quantized blocks: a unit of work is a block, of which each warp streams its 16 tokens through its
// own ring of asynchronous copies. How the work is shared out and merged is that of decode attention.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/decode-attention-quantized/decode-attention-quantized-warp.cuda.h"
#include "kernels/decode-attention-quantized/decode-attention-quantized.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "shared/attention/decode/span-block.cuda.h"
#include "shared/attention/part-weights.cuda.h"
#include "shared/attention/tensor-core-shapes.h"

namespace kv::cuda {
namespace {

constexpr int kWarps = kQuantizedBlockTokens / kQuantizedStepTokens;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerMultiprocessor = 3;
constexpr int kUnitsAhead = 2;  // units of a span that are prefetched while the kernel ahead still runs

using Parameters = DecodeParameters<QuantizedAttentionArguments>;

template <int kHeadDim>
using Partial = DecodePartial<kQuantizedRows, kHeadDim>;

template <int kHeadDim, int kKeyBits, int kValueBits>
struct Stage {
  CodeTile<kHeadDim, kKeyBits> keys;
  CodeTile<kHeadDim, kValueBits> values;
};

// Stages of a warp's ring. Three blocks of this fit into a multiprocessor of Hopper.
template <int kHeadDim, int kKeyBits, int kValueBits>
constexpr int kStages = kHeadDim * (kKeyBits + kValueBits) == 128 * 16 ? 4 : 5;

template <int kHeadDim, int kKeyBits, int kValueBits>
struct SharedStorage {
  union {
    Stage<kHeadDim, kKeyBits, kValueBits> ring[kWarps][kStages<kHeadDim, kKeyBits, kValueBits>];
    Partial<kHeadDim> partials[kWarps];
  };
  QueryDigits<kHeadDim> query;
  StepScales<quantized_groups(kHeadDim)> scales[kWarps];
  SpanShared<kWarps> span;
};

// ---- Streaming: one warp's tokens of a split. ----

template <int kHeadDim, int kKeyBits, int kValueBits>
class WarpStream {
 public:
  using Stage = cuda::Stage<kHeadDim, kKeyBits, kValueBits>;
  static constexpr int kRing = kStages<kHeadDim, kKeyBits, kValueBits>;

  __device__ WarpStream(const Parameters& parameters, Stage (&ring)[kRing], int64_t table_row, int first_unit,
                        int end_unit)
      : arguments_(parameters.arguments),
        faults_(parameters.faults),
        ring_(ring),
        keys_(codes_of<kKeyBits>(arguments_.keys)),
        values_(codes_of<kValueBits>(arguments_.values)),
        next_table_entry_(arguments_.block_table + table_row * arguments_.table_width + first_unit),
        units_left_(end_unit - first_unit) {
    const int lane = threadIdx.x % 32;
    const bool of_keys = lane < kGroups;
    scales_ = of_keys ? scales_of<kKeyBits>(arguments_.keys, lane) : scales_of<kValueBits>(arguments_.values, lane - kGroups);
    scales_stride_ = quantized_block_bytes(kHeadDim, of_keys ? kKeyBits : kValueBits);
    scales_place_ = of_keys ? offsetof(Stage, keys.scales) + lane * 16 : offsetof(Stage, values.scales) + (lane - kGroups) * 16;
    look_up();
    for (int stage = 0; stage < kRing - 1; ++stage) request(ring_[stage]);
  }

  // Waits for the oldest requested step and requests one more.
  __device__ Stage& next() {
    ptx::async_copy_wait<kRing - 2>();
    __syncwarp();  // also: no lane reads the stage any more that the request overwrites
    request(ring_[last_stage_]);
    last_stage_ = last_stage_ + 1 == kRing ? 0 : last_stage_ + 1;
    return ring_[last_stage_];
  }

 private:
  static constexpr int kGroups = quantized_groups(kHeadDim);

  // Where this lane's first chunk of a block begins, if it is block 0.
  template <int kBits>
  static __device__ const uint8_t* codes_of(const void* pool) {
    return static_cast<const uint8_t*>(pool) +
           (threadIdx.x / 32 * CodeTile<kHeadDim, kBits>::kChunks + threadIdx.x % 32) * 16;
  }
  template <int kBits>
  static __device__ const uint8_t* scales_of(const void* pool, int chunk) {
    return static_cast<const uint8_t*>(pool) + scale_offset(kHeadDim, kBits) + (threadIdx.x / 32 * kGroups + chunk) * 16;
  }

  __device__ void look_up() {
    if (units_left_ > 0) next_block_ = *next_table_entry_;
  }

  // A block that is not in the pool is not read.
  __device__ void request(Stage& stage) {
    if (units_left_ > 0) {
      const bool exists = next_block_ >= 0 && next_block_ < arguments_.block_count;
      if (!exists) report_fault(faults_, PagedFault::block_out_of_range, next_block_);
      const int64_t block = exists ? next_block_ : 0;
      copy(stage.keys, keys_ + block * quantized_block_bytes(kHeadDim, kKeyBits), exists);
      copy(stage.values, values_ + block * quantized_block_bytes(kHeadDim, kValueBits), exists);
      if (threadIdx.x % 32 < 2 * kGroups) {
        ptx::async_copy_16(reinterpret_cast<uint8_t*>(&stage) + scales_place_, scales_ + block * scales_stride_, exists,
                           policy_);
      }
      ++next_table_entry_;
      --units_left_;
      look_up();
    }
    ptx::async_copy_commit();
  }

  template <typename Tile>
  __device__ void copy(Tile& tile, const uint8_t* codes, bool exists) const {
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; chunk += 32) {
      ptx::async_copy_16(&tile.codes[Tile::place(chunk + threadIdx.x % 32)], codes + chunk * 16, exists, policy_);
    }
  }

  const QuantizedAttentionArguments& arguments_;
  const FaultSink& faults_;
  Stage (&ring_)[kRing];
  const uint8_t* const keys_;  // of this lane
  const uint8_t* const values_;
  const uint8_t* scales_;  // keys' for some lanes, values' for others
  int scales_stride_;
  int scales_place_;
  const uint64_t policy_ = ptx::evict_first_policy();
  const int32_t* next_table_entry_;
  int units_left_;
  int next_block_ = 0;
  int last_stage_ = kRing - 1;
};

// ---- Results are rotated back, and merged with those over other keys. ----

template <typename Element, int kHeadDim>
struct RotatedWriter {
  const QuantizedAttentionArguments& arguments;

  // kHeadDim / 4 neighbouring lanes have all dims of a row.
  __device__ void operator()(int64_t token, int head, const MergedPartial& merged, int dim) const {
    const int lane = threadIdx.x % 32;
    const unsigned lanes = kHeadDim == 128 ? 0xffffffffu : 0xffffu << (lane & 16);
    const float4 mean = merged.mean();
    float dims[4] = {(mean.x + mean.y) + (mean.z + mean.w), (mean.x - mean.y) + (mean.z - mean.w),
                     (mean.x + mean.y) - (mean.z + mean.w), (mean.x - mean.y) - (mean.z - mean.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int distance = 1; distance < kHeadDim / 4; distance *= 2) {
        const float partner = __shfl_xor_sync(lanes, dims[i], distance);
        dims[i] = lane & distance ? partner - dims[i] : dims[i] + partner;
      }
      dims[i] *= rotation_negates(dim + i) ? -kFactor : kFactor;
    }
    float log_sum_exp = merged.log_sum_exp();
    if (arguments.merge) {
      const float before = arguments.log_sum_exp[token * arguments.query_heads + head];
      __syncwarp(lanes);  // all have read it before one writes it
      if (log_sum_exp == -INFINITY) return;
      const PartWeights weights = part_weights(before, log_sum_exp);
      const Element* output = static_cast<const Element*>(arguments.output) + token * arguments.output_token_stride +
                              head * arguments.output_head_stride + dim;
#pragma unroll
      for (int i = 0; i < 4; ++i) dims[i] = to_float(output[i]) * weights.own + dims[i] * weights.other;
      log_sum_exp = weights.log_sum_exp;
    }
    write_row<Element>(arguments, token, head, make_float4(dims[0], dims[1], dims[2], dims[3]), log_sum_exp, dim);
  }

 private:
  static constexpr float kFactor = rotation_factor(kHeadDim);
};

// ---- A thread block streams a split. ----

template <typename Element, int kDim, int kKeyBits, int kValueBits>
class QuantizedCache {
 public:
  static constexpr int kWarps = cuda::kWarps;
  static constexpr int kPackRows = kQuantizedRows;
  static constexpr int kUnitTokens = kQuantizedBlockTokens;
  static constexpr int kHeadDim = kDim;
  static constexpr int kSplitCost = 0;
  static constexpr bool kSpansOfEntries = true;
  using Parameters = cuda::Parameters;
  using Entries = DecodeEntries<kUnitTokens, kPackRows, true>;
  using Shared = SharedStorage<kDim, kKeyBits, kValueBits>;
  using Writer = RotatedWriter<Element, kDim>;

  __device__ QuantizedCache(const Parameters& parameters, Shared& shared)
      : parameters_(parameters), arguments_(parameters.arguments), shared_(shared), entries_(parameters.arguments) {}

  __device__ void prefetch(int64_t row_start, int64_t first_token, const DecodeHead& head) const {
    const int64_t token = first_token + threadIdx.x / 2 * kUnitTokens;
    if (threadIdx.x >= 2 * kUnitsAhead || token >= head.keys) return;
    const bool of_keys = threadIdx.x % 2 == 0;
    const int block = __ldcg(arguments_.block_table + row_start + token / kUnitTokens);
    if (block < 0 || block >= arguments_.block_count) return;
    const int64_t bytes = quantized_block_bytes(kDim, of_keys ? kKeyBits : kValueBits);
    ptx::prefetch(static_cast<const uint8_t*>(of_keys ? arguments_.keys : arguments_.values) + block * bytes, bytes);
  }

  __device__ void stream_split(const DecodeEntry& entry, const DecodeHead& head, int first_unit, int end_unit) {
    const int warp = threadIdx.x / 32;
    if (head.keys == 0) end_unit = first_unit;
    WarpStream<kDim, kKeyBits, kValueBits> stream(parameters_, shared_.ring[warp],
                                                  entries_.table_row(entry.cache_head, head.slot), first_unit, end_unit);
    rotate_queries(entry, head);
    __syncthreads();
    QuantizedWarp<kDim, kKeyBits, kValueBits> attention(shared_.query, shared_.scales[warp]);
    for (int unit = first_unit; unit < end_unit; ++unit) {
      auto& stage = stream.next();
      attention.step(stage.keys, stage.values);
    }
    ptx::async_copy_wait<0>();
    __syncthreads();
    Partial<kDim>& partial = shared_.partials[warp];
    attention.finish(
        [&](int row, float reference, float sum) {
          partial.reference[row] = reference;
          partial.sum[row] = sum;
        },
        [&](int row, int dim, float2 outputs) { *reinterpret_cast<float2*>(&partial.output[row][dim]) = outputs; });
    __syncthreads();
  }

 private:
  // Scaled too. Rows beyond the pack are zeros, and their results are not written.
  __device__ void rotate_queries(const DecodeEntry& entry, const DecodeHead& head) {
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < kPackRows; row += kWarps) {
      float dims[kDim / 32] = {};
      if (row < entries_.rows(head, entry)) {
        const Element* query = static_cast<const Element*>(arguments_.query) +
                               entries_.token(head, entry, row) * arguments_.query_token_stride +
                               entries_.query_head(entry, row) * arguments_.query_head_stride;
#pragma unroll
        for (int g = 0; g < kDim / 32; ++g) dims[g] = to_float(query[32 * g + lane]) * arguments_.scale;
      }
      rotate(dims, kDim);
      write_digits<kDim>(dims, row, shared_.query);
    }
  }

  const Parameters& parameters_;
  const QuantizedAttentionArguments& arguments_;
  Shared& shared_;
  const Entries entries_;
};

template <typename Element, int kHeadDim, int kKeyBits, int kValueBits>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    decode_attention_quantized_kernel(const __grid_constant__ Parameters parameters) {
  using Cache = QuantizedCache<Element, kHeadDim, kKeyBits, kValueBits>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  ptx::let_next_kernel_start();
  SpanBlock<Cache>(parameters, *reinterpret_cast<typename Cache::Shared*>(shared_memory)).run();
}

// ---- Launch ----

template <typename Element, int kHeadDim, int kKeyBits, int kValueBits>
Status launch(const Parameters& parameters, cudaStream_t stream) {
  return launch_spans(decode_attention_quantized_kernel<Element, kHeadDim, kKeyBits, kValueBits>,
                      kBlocksPerMultiprocessor, kThreads, sizeof(SharedStorage<kHeadDim, kKeyBits, kValueBits>), stream,
                      parameters);
}

template <typename Element, int kHeadDim>
Status launch_for_bits(const Parameters& parameters, cudaStream_t stream) {
  const auto launch_it = parameters.arguments.key_bits == 8
                             ? parameters.arguments.value_bits == 8 ? launch<Element, kHeadDim, 8, 8>
                                                                    : launch<Element, kHeadDim, 8, 4>
                         : parameters.arguments.value_bits == 8 ? launch<Element, kHeadDim, 4, 8>
                                                                : launch<Element, kHeadDim, 4, 4>;
  return launch_it(parameters, stream);
}

template <typename Element>
Status launch_for_head_dim(const Parameters& parameters, cudaStream_t stream) {
  return parameters.arguments.head_dim == 64 ? launch_for_bits<Element, 64>(parameters, stream)
                                             : launch_for_bits<Element, 128>(parameters, stream);
}

}  // namespace

bool fits_decode_attention_quantized(const QuantizedAttentionArguments& given) {
  // Strides of pools have no meaning here, and scores may be scaled by any number.
  PagedAttentionArguments arguments = given;
  arguments.cache_dtype = given.query_dtype;
  arguments.block_tokens = kQuantizedBlockTokens;
  arguments.token_stride = arguments.block_stride = 0;
  arguments.scale = 1.0f;
  return fits_tensor_cores(arguments, kQuantizedBlockTokens);
}

Status decode_attention_quantized_memory(const QuantizedAttentionArguments& arguments, DecodeAttentionMemory* memory) {
  return span_memory(arguments, kBlocksPerMultiprocessor, kQuantizedRows, sizeof(Partial<128>), memory);
}

Status decode_attention_quantized(const QuantizedAttentionArguments& arguments, void* counters, void* workspace,
                                  FaultSink faults, cudaStream_t stream) {
  if (!fits_decode_attention_quantized(arguments)) {
    return Status::failure(StatusCode::capability,
                           "these tensors do not fit the tensor-core decode attention over quantized blocks");
  }
  if (arguments.batch == 0 || arguments.query_tokens == 0) return Status::success();
  const Parameters parameters{arguments, arguments.block_table, static_cast<unsigned*>(counters), workspace, faults};
  return arguments.query_dtype == DType::f16 ? launch_for_head_dim<__half>(parameters, stream)
                                             : launch_for_head_dim<__nv_bfloat16>(parameters, stream);
}

}  // namespace kv::cuda
