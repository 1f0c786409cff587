// Scores from quantized blocks on tensor cores. A warp streams parts of blocks through a ring of asynchronous copies. The
// codes of eight tokens and a group are one operand of an mma of signed bytes, as they are (8 bits), or shifted to the
// upper bits of a byte. The other operand is up to eight query rows, in two digits of 8 bits. So the dot product over a
// group is exact, and is then multiplied by the group's step in f32.
#include "kernels/quantized-key-scores/quantized-key-scores.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/async-copy.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/mma-s8.cuda.h"
#include "shared/key-scores/entry-head.cuda.h"
#include "shared/quantized-blocks/query-digits.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kPartTokens = 32;  // of a block, in a stage of a ring
constexpr int kParts = kQuantizedBlockTokens / kPartTokens;

constexpr int kStages = 3;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kWaves = 4;  // of thread blocks: multiprocessors that are further from the memory take fewer

// The codes of a part of a block. The 16-byte chunks of each 128 bytes are permuted so that the same chunk of eight tokens
// is in different banks.
template <int kHeadDim, int kBits>
struct Stage {
  static constexpr int kGroups = kHeadDim / kQuantizedGroupDims;
  static constexpr int kRowBytes = code_row_bytes(kHeadDim, kBits);
  static constexpr int kRowChunks = kRowBytes / 16;
  static constexpr int kUpperRowBytes = upper_row_bytes(kHeadDim, kBits);
  static constexpr int kCodeChunks = kPartTokens * kRowChunks;
  static constexpr int kUpperChunks = kPartTokens * kUpperRowBytes / 16;
  static constexpr int kScaleChunks = kPartTokens * kGroups / 16;

  static constexpr int kUpper = kCodeChunks * 16;  // where upper bits and scales begin
  static constexpr int kScales = kUpper + kUpperChunks * 16;

  alignas(128) uint8_t bytes[kScales + kScaleChunks * 16];

  static __device__ int place(int chunk) { return (chunk ^ chunk / 8 % kRowChunks) * 16; }
};

template <int kHeadDim, int kBits>
struct SharedStorage {
  Stage<kHeadDim, kBits> ring[kWarps][kStages];
  alignas(16) float steps[kWarps][kPartTokens][kHeadDim / kQuantizedGroupDims];
  QueryDigits<kHeadDim> query;
};

// ---- Streaming: a warp's parts of a span of blocks. ----

template <int kHeadDim, int kBits>
class WarpStream {
 public:
  using Stage = cuda::Stage<kHeadDim, kBits>;

  // Of the parts of blocks `first` to `end`, every kWarps-th from that of this warp on.
  __device__ WarpStream(const QuantizedKeyScoresArguments& a, const EntryHead& entry, FaultSink faults, Stage (&ring)[kStages],
                        int first, int end)
      : a_(a), entry_(entry), faults_(faults), ring_(ring), part_(first * kParts + static_cast<int>(threadIdx.x) / kWarp), end_(end * kParts) {
    look_up();
    for (int stage = 0; stage < kStages - 1; ++stage) request(ring_[stage]);
  }

  // Waits for the oldest requested part and requests one more.
  __device__ Stage& next() {
    ptx::async_copy_wait<kStages - 2>();
    __syncwarp();  // also: no lane reads the stage any more that the request overwrites
    request(ring_[last_]);
    last_ = last_ + 1 == kStages ? 0 : last_ + 1;
    return ring_[last_];
  }

 private:
  __device__ void look_up() {
    if (part_ < end_) number_ = entry_.table[part_ / kParts];
  }

  // A block that is not in the pool is not read.
  __device__ void request(Stage& stage) {
    if (part_ < end_) {
      const bool exists = number_ >= 0 && number_ < a_.block_count;
      if (!exists) report_fault(faults_, PagedFault::block_out_of_range, number_);
      const uint8_t* block = a_.keys + (exists ? number_ : 0) * quantized_block_bytes(kHeadDim, kBits);
      const int first = part_ % kParts * kPartTokens;
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const uint8_t* codes = block + first * Stage::kRowBytes;
#pragma unroll
      for (int chunk = 0; chunk < Stage::kCodeChunks; chunk += kWarp) {
        copy(stage.bytes + Stage::place(chunk + lane), codes + (chunk + lane) * 16, exists);
      }
      const uint8_t* upper = block + upper_offset(kHeadDim, kBits) + first * Stage::kUpperRowBytes;
      for (int chunk = lane; chunk < Stage::kUpperChunks; chunk += kWarp) {
        copy(stage.bytes + Stage::kUpper + chunk * 16, upper + chunk * 16, exists);
      }
      if (lane < Stage::kScaleChunks) {
        copy(stage.bytes + Stage::kScales + lane * 16, block + scale_offset(kHeadDim, kBits) + first * Stage::kGroups + lane * 16, exists);
      }
      part_ += kWarps;
      look_up();
    }
    ptx::async_copy_commit();
  }

  __device__ void copy(uint8_t* to, const uint8_t* from, bool exists) const { ptx::async_copy_16(to, from, exists, policy_); }

  const QuantizedKeyScoresArguments& a_;
  const EntryHead& entry_;
  const FaultSink faults_;
  Stage (&ring_)[kStages];
  const uint64_t policy_ = ptx::evict_first_policy();
  int part_;
  const int end_;
  int number_ = 0;
  int last_ = kStages - 1;
};

// ---- Scores of eight rows with a part of a block. ----

// A thread holds the scores of row lane / 4 with the tokens 2 * (lane % 4) and the next of each eight.
template <int kHeadDim, int kBits>
class PartScores {
  using Stage = cuda::Stage<kHeadDim, kBits>;
  static constexpr int kGroups = Stage::kGroups;

 public:
  __device__ PartScores(const QueryDigits<kHeadDim>& query, float (&steps)[kPartTokens][kGroups])
      : steps_(steps), lane_(static_cast<int>(threadIdx.x) % kWarp) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      ptx::load_matrices(query_[g], &query.digits[lane_ % 16][lane_ / 16 * 16 + g * kQuantizedGroupDims]);
    }
    // 2^-4 is that of steps, and the others those of codes that are shifted.
    unit_ = query.units[lane_ / 4] * (kBits == 8 ? 0x1p-4f : kBits == 4 ? 0x1p-8f : kBits == 3 ? 0x1p-9f : 0x1p-10f);
  }

  // Calls use(first token of the part, its score and the next one's).
  template <typename Use>
  __device__ void score(const Stage& stage, const Use& use) {
    share_steps(stage);
    __syncwarp();
    constexpr int kTilesAtOnce = Stage::kRowChunks < 4 ? 4 / Stage::kRowChunks : 1;
    constexpr int kLoads = Stage::kRowChunks * kTilesAtOnce / 4;
    const int matrix = lane_ / 8;
    const int place = Stage::place((matrix / Stage::kRowChunks * 8 + lane_ % 8) * Stage::kRowChunks + matrix % Stage::kRowChunks);
#pragma unroll
    for (int tile = 0; tile < kPartTokens / 8; tile += kTilesAtOnce) {
      uint32_t words[kLoads][4];
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        ptx::load_matrices(words[load], &stage.bytes[tile * 8 * Stage::kRowBytes + (place ^ load * 64)]);
      }
#pragma unroll
      for (int next = 0; next < kTilesAtOnce; ++next) {
        const auto word = [&](int chunk) { return words[(next * Stage::kRowChunks + chunk) / 4][(next * Stage::kRowChunks + chunk) % 4]; };
        const float2 both = score_tile(word, stage.bytes + Stage::kUpper, tile + next);
        use((tile + next) * 8 + lane_ % 4 * 2, make_float2(both.x * unit_, both.y * unit_));
      }
    }
  }

 private:
  // Each scale is converted by one lane, for all.
  __device__ void share_steps(const Stage& stage) {
    constexpr int kOfLane = kPartTokens * kGroups / kWarp;
#pragma unroll
    for (int i = 0; i < kOfLane; i += 2) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(&stage.bytes[Stage::kScales + lane_ * kOfLane + i]);
      const uint32_t halves = __byte_perm(two, 0, 0x4140) << 7;
      float* steps = &steps_[0][0] + lane_ * kOfLane + i;
      *reinterpret_cast<float2*>(steps) = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    }
  }

  template <typename Word>
  __device__ float2 score_tile(const Word& word, const uint8_t* upper, int tile) const {
    float2 scores = make_float2(0.0f, 0.0f);
    const float(*steps)[kGroups] = &steps_[tile * 8 + lane_ % 4 * 2];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      uint32_t codes[2];
      if constexpr (kBits == 8) {
        codes[0] = word(2 * g);
        codes[1] = word(2 * g + 1);
      } else if constexpr (kBits == 4) {
        codes[0] = ptx::mask_and_flip(word(g) << 4, 0xf0f0f0f0u, 0x88888888u);
        codes[1] = ptx::mask_and_flip(word(g), 0xf0f0f0f0u, 0x88888888u);
      } else {
        const uint32_t upper_bits = kBits == 2 ? 0 : upper_word(upper, tile, g / 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) codes[half] = codes_of_sixteen(word(g / 2), upper_bits, g % 2 * 2 + half);
      }
      int32_t digits[4];
      ptx::mma_m16n8k32_s8(digits, query_[g], codes[0], codes[1]);
      scores.x = fmaf(static_cast<float>(256 * digits[0] + digits[2]), steps[0][g], scores.x);
      scores.y = fmaf(static_cast<float>(256 * digits[1] + digits[3]), steps[1][g], scores.y);
    }
    return scores;
  }

  // The lane's upper bits of a pair: bit i of each byte is that of its i-th sixteen dims.
  __device__ uint32_t upper_word(const uint8_t* upper, int tile, int pair) const {
    const int token = tile * 8 + lane_ / 4;
    const int place = token * Stage::kUpperRowBytes + pair * 8 + lane_ % 2 * 4;
    return *reinterpret_cast<const uint32_t*>(upper + place) >> (lane_ & 2) * 2;
  }

  // Codes of 3 or 2 bits in the upper bits of each byte, less the middle one.
  static __device__ uint32_t codes_of_sixteen(uint32_t lower, uint32_t upper, int sixteen) {
    if constexpr (kBits == 2) return ptx::mask_and_flip(lower << (6 - 2 * sixteen), 0xc0c0c0c0u, 0xa0a0a0a0u);
    const uint32_t moved = sixteen < 3 ? lower << (5 - 2 * sixteen) : lower >> 1;
    const uint32_t without_upper = ptx::mask_and_flip(moved, 0x60606060u, 0x90909090u);
    return ptx::mask_and_flip(upper << (7 - sixteen), 0x80808080u, without_upper);
  }

  uint32_t query_[kGroups][4];
  float (&steps_)[kPartTokens][kGroups];
  const int lane_;
  float unit_;
};

// ---- The kernel ----

// Each warp writes a row of the pack, scaled, and rotated if keys are. Rows beyond the columns are zeros.
template <typename Element, int kHeadDim>
__device__ void write_queries(const QuantizedKeyScoresArguments& a, const EntryHead& entry, int first, QueryDigits<kHeadDim>& to) {
  static_assert(kWarps == kQuantizedRows, "a warp for each row");
  const int row = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int group_heads = a.query_heads / a.kv_heads;
  const int column = first + row;
  float dims[kHeadDim / kQuantizedGroupDims] = {};
  if (column < entry.columns) {
    const Element* query = static_cast<const Element*>(a.query) + (entry.first_row + column / group_heads) * a.query_token_stride +
                           (static_cast<int>(blockIdx.y) * group_heads + column % group_heads) * a.query_head_stride;
#pragma unroll
    for (int g = 0; g < kHeadDim / kQuantizedGroupDims; ++g) dims[g] = to_float(query[g * kWarp + lane]) * a.scale;
  }
  if (a.rotated) rotate(dims, kHeadDim);
  write_digits<kHeadDim>(dims, row, to);
}

template <typename Element, int kHeadDim, int kBits>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    score_blocks(const __grid_constant__ QuantizedKeyScoresArguments a, const FaultSink faults) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedStorage<kHeadDim, kBits>*>(memory);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int head = static_cast<int>(blockIdx.y);
  const int group_heads = a.query_heads / a.kv_heads;
  const EntryHead entry(a, static_cast<int>(blockIdx.z), head, faults);
  const int first = static_cast<int>(int64_t{entry.blocks} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{entry.blocks} * (blockIdx.x + 1) / gridDim.x);
  if (first == end) return;
  for (int pack = 0; pack < entry.columns; pack += kQuantizedRows) {
    WarpStream<kHeadDim, kBits> stream(a, entry, faults, shared.ring[warp], first, end);
    write_queries<Element, kHeadDim>(a, entry, pack, shared.query);
    __syncthreads();
    PartScores<kHeadDim, kBits> scores(shared.query, shared.steps[warp]);
    const int column = pack + lane / 4;
    float* row = a.scores + (entry.first_row + column / group_heads) * a.score_token_stride +
                 (head * group_heads + column % group_heads) * a.score_head_stride;
    for (int part = first * kParts + warp; part < end * kParts; part += kWarps) {
      scores.score(stream.next(), [&](int token, float2 both) {
        if (column < entry.columns) *reinterpret_cast<float2*>(row + int64_t{part} * kPartTokens + token) = both;
      });
    }
    ptx::async_copy_wait<0>();
    __syncthreads();  // the queries and the rings are read no more
  }
}

// ---- Launch ----

template <typename Element, int kHeadDim, int kBits>
Status launch(const QuantizedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  const auto kernel = score_blocks<Element, kHeadDim, kBits>;
  constexpr size_t kBytes = sizeof(SharedStorage<kHeadDim, kBits>);
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return cuda_status(error);
  const int heads = a.kv_heads * a.batch;
  const int even = (kWaves * kBlocksPerMultiprocessor * multiprocessors + heads - 1) / heads;
  const int most = (a.table_width * kParts + kWarps - 1) / kWarps;
  const dim3 blocks(static_cast<unsigned>(most < 1 ? 1 : most < even ? most : even), static_cast<unsigned>(a.kv_heads),
                    static_cast<unsigned>(a.batch));
  kernel<<<blocks, kThreads, kBytes, stream>>>(a, faults);
  return launch_status();
}

template <typename Element, int kHeadDim>
Status launch_for_bits(const QuantizedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  switch (a.key_bits) {
    case 8:
      return launch<Element, kHeadDim, 8>(a, faults, stream);
    case 4:
      return launch<Element, kHeadDim, 4>(a, faults, stream);
    case 3:
      return launch<Element, kHeadDim, 3>(a, faults, stream);
    default:
      return launch<Element, kHeadDim, 2>(a, faults, stream);
  }
}

template <typename Element>
Status launch_for_head_dim(const QuantizedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  return a.head_dim == 64 ? launch_for_bits<Element, 64>(a, faults, stream) : launch_for_bits<Element, 128>(a, faults, stream);
}

}  // namespace

bool fits_quantized_key_scores(const QuantizedKeyScoresArguments& a) {
  const bool aligned =
      reinterpret_cast<uintptr_t>(a.scores) % 8 == 0 && a.score_token_stride % 2 == 0 && a.score_head_stride % 2 == 0;
  return a.query_dtype != DType::f32 && (a.head_dim == 64 || a.head_dim == 128) && aligned;
}

Status quantized_key_scores(const QuantizedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  return a.query_dtype == DType::f16 ? launch_for_head_dim<__half>(a, faults, stream)
                                     : launch_for_head_dim<__nv_bfloat16>(a, faults, stream);
}

}  // namespace kv::cuda
