// Scores from codes on tensor cores. The book lies in shared memory, and what is looked up there for a code is a register
// of the first operand of a [16, 16] by [16, 8] product, whose columns are up to eight rows and heads of queries. So a code
// is looked up once for all of them, and nothing is moved between lanes.
//
// A warp takes whole coded blocks. Lane 4 * octet + quad reads its stream's words of a chunk, and holds the codes of eight
// tokens and four groups: tokens t and t + 1 are the rows `octet` and `octet + 8` of product t / 2, and the quad is where
// in a row the lane's elements lie. Queries are arranged likewise, so which dims a product sums over does not matter.
//
// What bounds it is the look-ups: 32 lanes read random banks, 3.5 words of the same bank on average.
#include <type_traits>

#include "kernels/coded-key-scores/coded-key-scores-ranges.cuda.h"
#include "kernels/coded-key-scores/coded-key-scores-words.cuda.h"
#include "ptx/arithmetic.cuda.h"
#include "ptx/mma.cuda.h"
#include "shared/coded-keys/coded-keys.cuda.h"
#include "shared/cuda/overlapped-launch.cuda.h"

namespace kv::cuda {
namespace {

constexpr int kWarps = 12;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kColumns = 8;
constexpr int kProducts = 4;  // of 16 tokens each

template <int kSubDim>
using Entry = std::conditional_t<kSubDim == 2, uint32_t, uint2>;

// The kernel's book has an entry for each code, or for each centroid if codes could name far more.
template <int kBits>
constexpr bool kEveryCode = kBits <= 13;

template <int kSubDim, int kBits>
__host__ __device__ int64_t book_bytes(int centroids) {
  return (int64_t{kEveryCode<kBits> ? 1 << kBits : centroids} * static_cast<int64_t>(sizeof(Entry<kSubDim>)) + 127) / 128 * 128;
}

template <int kSubDim, int kBits>
__device__ void fetch_book(const CodedKeys& coded, int head, Entry<kSubDim>* book) {
  const auto* from = reinterpret_cast<const Entry<kSubDim>*>(coded.centroids + coded.book_offset(head, 0));
  const int entries = kEveryCode<kBits> ? 1 << kBits : coded.centroid_count;
  constexpr int kPerLoad = 16 / sizeof(Entry<kSubDim>);
  const int whole = coded.centroid_count / kPerLoad;
  for (int i = static_cast<int>(threadIdx.x); i < whole; i += kThreads) {
    reinterpret_cast<uint4*>(book)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  // Codes beyond the last centroid count as the last one.
  for (int i = whole * kPerLoad + static_cast<int>(threadIdx.x); i < entries; i += kThreads) {
    book[i] = from[min(i, coded.centroid_count - 1)];
  }
}

// The queries of eight columns as second operands, and where the lane's two columns of scores go.
template <int kSubDim, int kChunks>
class Queries {
 public:
  static constexpr int kSteps = kSubDim;  // products of a chunk, for 16 tokens
  static constexpr int kDims = 4 * kSteps;  // of a chunk, in a lane
  static constexpr int kChunkDims = kChunkGroups * kSubDim;

  __device__ Queries(const CodedKeyScoresArguments& a, const EntryHead& entry, int head, int first) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int column = first + lane / 4;
    const int group_heads = a.query_heads / a.kv_heads;
    const bool bf16 = a.query_dtype == DType::bf16;
    const float* scales = a.coded.channel_scale;
    const int64_t query = (entry.first_row + column / group_heads) * a.query_token_stride +
                          (head * group_heads + column % group_heads) * a.query_head_stride;
    const int dim = lane % 4 * kQuadGroups * kSubDim;
    // All are asked for before one is used.
    uint16_t bits[kChunks][kDims] = {};
    if (column < entry.columns) {
#pragma unroll
      for (int i = 0; i < kChunks * kDims; ++i) {
        bits[i / kDims][i % kDims] = static_cast<const uint16_t*>(a.query)[query + i / kDims * kChunkDims + dim + i % kDims];
      }
    }
    float dims[kChunks][kDims];
    float largest = 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        float& own = dims[chunk][i];
        own = bf16 ? to_float(__ushort_as_bfloat16(bits[chunk][i])) : to_float(__ushort_as_half(bits[chunk][i]));
        if (scales != nullptr) own *= scales[int64_t{head} * a.head_dim + chunk * kChunkDims + dim + i];
        largest = fmaxf(largest, fabsf(own));
      }
    }
    // What f16 may not hold is written as multiples of the power of two below the largest dim.
    float unit = 1.0f;
    if (bf16 || scales != nullptr) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const uint32_t exponent = __float_as_uint(largest) & 0x7f800000u;
      unit = exponent == 0 || exponent == 0x7f800000u ? 1.0f : __uint_as_float(exponent);
    }
    const float units = 1.0f / unit;  // exact
#pragma unroll
    for (int i = 0; i < kChunks * kDims; i += 2) {
      const float(&own)[kDims] = dims[i / kDims];
      operands_[i / kDims][i % kDims / 4][i % 4 / 2] = ptx::pack<__half>(own[i % kDims] * units, own[i % kDims + 1] * units);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = lane % 4 * 2 + i;
      factors_[i] = a.scale * __shfl_sync(0xffffffffu, unit, own * 4);
      const int number = first + own;
      scores_[i] = number >= entry.columns
                       ? nullptr
                       : a.scores + (entry.first_row + number / group_heads) * a.score_token_stride +
                             (head * group_heads + number % group_heads) * a.score_head_stride + lane / 4 * 4;
    }
  }

  __device__ const uint32_t (&operand(int chunk, int step) const)[2] { return operands_[chunk][step]; }

  // Writes the sums of a block, and adds them to the ranges of the columns, if these count.
  template <bool kRanges>
  __device__ void write(int64_t first_token, const float (&sums)[kProducts][4], ScoreRange (&ranges)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (scores_[i] == nullptr) continue;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float(&low)[4] = sums[2 * tile];
        const float(&high)[4] = sums[2 * tile + 1];
        const float4 four =
            make_float4(low[i] * factors_[i], low[2 + i] * factors_[i], high[i] * factors_[i], high[2 + i] * factors_[i]);
        *reinterpret_cast<float4*>(scores_[i] + first_token + 32 * tile) = four;
        if constexpr (!kRanges) continue;
        ranges[i].add(four.x);
        ranges[i].add(four.y);
        ranges[i].add(four.z);
        ranges[i].add(four.w);
      }
    }
  }

 private:
  uint32_t operands_[kChunks][kSteps][2];
  float factors_[2];
  float* scores_[2];
};

template <int kPlace, int kBits>
__device__ uint32_t code_of(const uint32_t (&words)[kBits], int count) {
  constexpr int kWord = kPlace * kBits / 32;
  constexpr int kShift = kPlace * kBits % 32;
  uint32_t code;
  if constexpr (kShift + kBits <= 32) {
    code = words[kWord] >> kShift & low_bits(kBits);
  } else {
    code = __funnelshift_r(words[kWord], words[kWord + 1], kShift) & low_bits(kBits);
  }
  return kEveryCode<kBits> ? code : min(code, static_cast<uint32_t>(count - 1));
}

// Adds a chunk's part of the products of 16 tokens: those of places 8 * kProduct and following.
template <int kProduct, int kBits>
__device__ void add_product(const uint32_t (&words)[kBits], const uint32_t* book, int count, const uint32_t (*operands)[2],
                            float (&sums)[4]) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    constexpr int kFirst = 8 * kProduct;
    uint32_t fragment[4];
    if (step == 0) {
      fragment[0] = book[code_of<kFirst>(words, count)];
      fragment[1] = book[code_of<kFirst + 4>(words, count)];
      fragment[2] = book[code_of<kFirst + 1>(words, count)];
      fragment[3] = book[code_of<kFirst + 5>(words, count)];
    } else {
      fragment[0] = book[code_of<kFirst + 2>(words, count)];
      fragment[1] = book[code_of<kFirst + 6>(words, count)];
      fragment[2] = book[code_of<kFirst + 3>(words, count)];
      fragment[3] = book[code_of<kFirst + 7>(words, count)];
    }
    ptx::mma_m16n8k16<__half>(sums, fragment, operands[step][0], operands[step][1]);
  }
}

template <int kGroup, int kProduct, int kBits>
__device__ void add_group(const uint32_t (&words)[kBits], const uint2* book, int count, const uint32_t (*operands)[2],
                          float (&sums)[4]) {
  const uint2 first = book[code_of<8 * kProduct + kGroup>(words, count)];
  const uint2 second = book[code_of<8 * kProduct + kGroup + 4>(words, count)];
  const uint32_t fragment[4] = {first.x, second.x, first.y, second.y};
  ptx::mma_m16n8k16<__half>(sums, fragment, operands[kGroup][0], operands[kGroup][1]);
}

template <int kProduct, int kBits>
__device__ void add_product(const uint32_t (&words)[kBits], const uint2* book, int count, const uint32_t (*operands)[2],
                            float (&sums)[4]) {
  add_group<0, kProduct>(words, book, count, operands, sums);
  add_group<1, kProduct>(words, book, count, operands, sums);
  add_group<2, kProduct>(words, book, count, operands, sums);
  add_group<3, kProduct>(words, book, count, operands, sums);
}

// Sums of spoilt tokens are NaN.
__device__ void spoil(uint2 tokens, float (&sums)[kProducts][4]) {
  const int first = static_cast<int>(threadIdx.x) % kWarp / 4 * 4;
#pragma unroll
  for (int product = 0; product < kProducts; ++product) {
    const uint32_t own = (product / 2 == 0 ? tokens.x : tokens.y) >> (first + product % 2 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((own >> (i / 2) & 1) != 0) sums[product][i] = NAN;
    }
  }
}

template <int kSubDim, int kBits, int kChunks, bool kRanges>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    score_blocks(const __grid_constant__ CodedKeyScoresArguments a, const FaultSink faults) {
  extern __shared__ uint4 memory[];
  __shared__ float2 of_warps[kWarps][kColumns];  // ranges
  auto* book = reinterpret_cast<Entry<kSubDim>*>(memory);
  const int head = static_cast<int>(blockIdx.y);
  ptx::let_next_kernel_start();
  fetch_book<kSubDim, kBits>(a.coded, head, book);
  ChunkWords<kSubDim, kBits, kChunks> words_of(reinterpret_cast<unsigned char*>(memory) + book_bytes<kSubDim, kBits>(a.coded.centroid_count));
  ptx::wait_for_previous_kernel();
  __syncthreads();
  const EntryHead entry(a, static_cast<int>(blockIdx.z), head, faults);
  const int first = static_cast<int>(int64_t{entry.blocks} * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(int64_t{entry.blocks} * (blockIdx.x + 1) / gridDim.x);
  const int count = a.coded.centroid_count;
  const int own = first + static_cast<int>(threadIdx.x) / kWarp;
  const auto number_of = [&](int index) { return index < end ? entry.block(index, a.block_count, faults) : -1; };
  for (int column = 0; column < entry.columns; column += kColumns) {
    const Queries<kSubDim, kChunks> queries(a, entry, head, column);
    ScoreRange ranges[2];
    int32_t number = number_of(own);
    if (number >= 0) words_of.begin(a.coded.block(number));
    for (int index = own; index < end; index += kWarps) {
      const int32_t next = number_of(index + kWarps);
      if (number >= 0) {
        const uint32_t* block = a.coded.block(number);
        const uint32_t* behind = next < 0 ? nullptr : a.coded.block(next);
        const uint2 spoilt = *reinterpret_cast<const uint2*>(a.coded.spoilt(number));
        float sums[kProducts][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          uint32_t words[kBits];
          words_of.load(block, chunk, behind, words);
          add_product<0>(words, book, count, &queries.operand(chunk, 0), sums[0]);
          add_product<1>(words, book, count, &queries.operand(chunk, 0), sums[1]);
          add_product<2>(words, book, count, &queries.operand(chunk, 0), sums[2]);
          add_product<3>(words, book, count, &queries.operand(chunk, 0), sums[3]);
        }
        if ((spoilt.x | spoilt.y) != 0) spoil(spoilt, sums);
        queries.template write<kRanges>(int64_t{index} * kCodedBlockTokens, sums, ranges);
      } else if (next >= 0) {
        words_of.begin(a.coded.block(next));
      }
      number = next;
    }
    if constexpr (kRanges) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        for (int distance = 4; distance < kWarp; distance *= 2) ranges[i].add_lane(distance);
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        if (lane < 4) of_warps[threadIdx.x / kWarp][lane * 2 + i] = ranges[i].both();
      }
      write_ranges(a, entry, head, column, of_warps);
    }
  }
}

// ---- Launch ----

template <int kSubDim, int kBits, int kChunks>
Status launch(const CodedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  const auto kernel = a.ranges == nullptr ? score_blocks<kSubDim, kBits, kChunks, false> : score_blocks<kSubDim, kBits, kChunks, true>;
  int major = 0;
  const Status found = find_compute_capability(major);
  if (!found.ok()) return found;
  auto bytes = static_cast<int>(book_bytes<kSubDim, kBits>(a.coded.centroid_count));
  if (major >= 9) bytes += ChunkWords<kSubDim, kBits, kChunks>::kBytes * kWarps;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return cuda_status(error);
  const int heads = a.kv_heads * a.batch;
  const int even = (kBlocksPerMultiprocessor * multiprocessors + heads - 1) / heads;
  const int wide = (a.table_width + kWarps - 1) / kWarps;
  const int most = a.ranges != nullptr && a.range_parts < wide ? a.range_parts : wide;
  const dim3 blocks(static_cast<unsigned>(most < 1 ? 1 : most < even ? most : even), static_cast<unsigned>(a.kv_heads),
                    static_cast<unsigned>(a.batch));
  return launch_overlapped(kernel, blocks, dim3(kThreads), static_cast<size_t>(bytes), stream, a, faults);
}

template <int kSubDim, int kBits>
Status launch_for_head_dim(const CodedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  constexpr int kChunkDims = kChunkGroups * kSubDim;
  return a.head_dim == 64 ? launch<kSubDim, kBits, 64 / kChunkDims>(a, faults, stream)
                          : launch<kSubDim, kBits, 128 / kChunkDims>(a, faults, stream);
}

template <int kBits>
Status launch_for_sub_dim(const CodedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  return a.coded.sub_dim == 2 ? launch_for_head_dim<2, kBits>(a, faults, stream)
                              : launch_for_head_dim<4, kBits>(a, faults, stream);
}

}  // namespace

bool fits_coded_key_scores(const CodedKeyScoresArguments& a) {
  const int bits = a.coded.code_bits;
  const bool aligned = reinterpret_cast<uintptr_t>(a.scores) % 16 == 0 && a.score_token_stride % 4 == 0 &&
                       a.score_head_stride % 4 == 0 && reinterpret_cast<uintptr_t>(a.coded.centroids) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(a.coded.codes) % 16 == 0 &&
                       a.coded.book_elements() % 8 == 0;
  return a.query_dtype != DType::f32 && (a.head_dim == 64 || a.head_dim == 128) && a.coded.books == 1 &&
         (a.coded.sub_dim == 2 || a.coded.sub_dim == 4) && (bits == 8 || bits == 12 || bits == 13 || bits == 16) && aligned;
}

Status coded_key_scores(const CodedKeyScoresArguments& a, FaultSink faults, cudaStream_t stream) {
  switch (a.coded.code_bits) {
    case 8:
      return launch_for_sub_dim<8>(a, faults, stream);
    case 12:
      return launch_for_sub_dim<12>(a, faults, stream);
    case 13:
      return launch_for_sub_dim<13>(a, faults, stream);
    default:
      return launch_for_sub_dim<16>(a, faults, stream);
  }
}

}  // namespace kv::cuda
