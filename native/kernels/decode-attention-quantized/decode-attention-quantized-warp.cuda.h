// Attention of up to eight query rows by one warp, over 16 keys and values at a time whose codes lie in shared memory.
// S^T = K Q^T and O^T = V^T P^T, so the rows are columns here. Device code (sm_80).
//
// Keys: the codes of a group are one operand of a product of signed bytes, as they are (8 bits), or 16 * (code - 7.5) (4
// bits). The other operand is the rotated query in 16 bits, in two digits of 8. So the dot product over a group is
// exact, and is then multiplied by the group's step in f32.
// Values: code * step as f16, which is exact: at most 7 bits times 4. It is divided by kValueUnit, which keeps the
// largest of them in range. Steps so small that this leaves no room (below 2^-17) are rounded to f16's smallest numbers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/matrix-transpose.cuda.h"
#include "ptx/mma-s8.cuda.h"
#include "ptx/mma.cuda.h"
#include "shared/attention/column-softmax.cuda.h"
#include "shared/quantized-blocks/quantized-blocks.cuda.h"

namespace kv {

constexpr int kQuantizedRows = 8;          // query rows of a warp
constexpr int kQuantizedStepTokens = 16;   // keys and values of a step
constexpr float kValueUnit = 8.0f;         // partial outputs are multiples of it

// The rotated queries of a pack, in shared memory: row = unit * (256 * digits[0] + digits[1]). The unit of a row that is
// not finite is NaN.
template <int kHeadDim>
struct QueryDigits {
  alignas(16) int8_t digits[2][kQuantizedRows][kHeadDim];
  float units[kQuantizedRows];
};

// A warp writes one row. `row` has dim l of group g in row[g] of lane l.
template <int kHeadDim>
__device__ void write_digits(float (&row)[kHeadDim / 32], int number, QueryDigits<kHeadDim>& to) {
  constexpr float kMost = 127 * 256 + 127;
  const int lane = threadIdx.x % 32;
  unsigned largest_bits = 0;
#pragma unroll
  for (const float x : row) largest_bits = max(largest_bits, __float_as_uint(x) & 0x7fffffffu);
  largest_bits = __reduce_max_sync(0xffffffffu, largest_bits);
  const float largest = __uint_as_float(largest_bits);
  const bool finite = largest < INFINITY;
#pragma unroll
  for (int g = 0; g < kHeadDim / 32; ++g) {
    const int whole = finite && largest > 0.0f ? __float2int_rn(row[g] / largest * kMost) : 0;
    const int high = (whole + 128) >> 8;
    to.digits[0][number][32 * g + lane] = static_cast<int8_t>(high);
    to.digits[1][number][32 * g + lane] = static_cast<int8_t>(whole - 256 * high);
  }
  if (lane == 0) to.units[number] = finite ? largest / kMost : NAN;
}

// 16 tokens of a block of keys, or of values, in shared memory. The 16-byte chunks of each 128 bytes are permuted so that
// the lanes of a warp find their codes in different banks.
template <bool kKeys, int kHeadDim, int kBits>
struct CodeTile {
  static constexpr int kRowBytes = code_row_bytes(kHeadDim, kBits);
  static constexpr int kChunks = kQuantizedStepTokens * kRowBytes / 16;
  static constexpr int kGroups = kHeadDim / kQuantizedGroupDims;

  alignas(128) uint8_t codes[kQuantizedStepTokens * kRowBytes];
  alignas(16) uint8_t scales[kQuantizedStepTokens * kGroups];

  // Where a chunk of the block's bytes lies.
  static __device__ int place(int chunk) {
    const int row = chunk * 16 / kRowBytes;
    const int turn = kKeys ? (chunk / 8 % 4) << (kBits == 8) : row / 2 % 4 * 2;
    return (chunk ^ turn) * 16;
  }
  static __device__ int place(int row, int byte) { return place((row * kRowBytes + byte) / 16) + byte % 16; }

  template <typename Word>
  __device__ Word at(int place) const {
    return *reinterpret_cast<const Word*>(&codes[place]);
  }
};

// Of the query rows, a thread holds the scores and outputs of rows 2 * (lane % 4) and the next.
template <int kHeadDim, int kKeyBits, int kValueBits>
class QuantizedWarp {
 public:
  using Keys = CodeTile<true, kHeadDim, kKeyBits>;
  using Values = CodeTile<false, kHeadDim, kValueBits>;

  __device__ QuantizedWarp(const QueryDigits<kHeadDim>& query, float scale) : softmax_(1.0f), lane_(threadIdx.x % 32) {
    const int pair = lane_ % 4;
#pragma unroll
    for (int digit = 0; digit < 2; ++digit) {
      const int8_t* row = query.digits[digit][lane_ / 4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int first = 32 * g + (kKeyBits == 8 ? 8 : 4) * pair;
        query_[digit][g][0] = *reinterpret_cast<const uint32_t*>(row + first);
        query_[digit][g][1] = *reinterpret_cast<const uint32_t*>(row + first + (kKeyBits == 8 ? 4 : 16));
      }
    }
    // The last factors are those of scales that are read as f16, and of codes of 4 bits.
    const float factor = scale * 0x1p-4f * (kKeyBits == 4 ? 0x1p-4f : 1.0f);
    factors_[0] = query.units[2 * pair] * factor;
    factors_[1] = query.units[2 * pair + 1] * factor;
  }

  __device__ void step(const Keys& keys, const Values& values) {
    float scores[1][1][4];
    score(keys, scores[0][0]);
    float correction[2];
    if (softmax_.observe(scores, correction)) {
#pragma unroll
      for (auto& tile : output_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[i] *= correction[i % 2];
      }
    }
    softmax_.weigh(scores);
    const float(&weights)[4] = scores[0][0];
    add(values, ptx::transpose_matrix(ptx::pack<__half>(weights[0], weights[1])),
        ptx::transpose_matrix(ptx::pack<__half>(weights[2], weights[3])));
  }

  // Adds up the sums. Must be called once, after the last step.
  __device__ void finish() { softmax_.finish(); }

  // For row `column` of this thread's rows.
  __device__ const ColumnSoftmax<1>& softmax() const { return softmax_; }

  // Calls use(dim, output) for all dims that this thread has of row `column` of its rows. Outputs are not normalised,
  // and are multiples of kValueUnit.
  template <typename Use>
  __device__ void for_each_output(int column, const Use& use) const {
    constexpr int kOwn = kHeadDim / 16;
    const int owner = lane_ / 4;
#pragma unroll
    for (int tile = 0; tile < kOwn; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int dim = kValueBits == 8 ? 2 * kOwn * owner + 2 * tile + half
                                        : owner * kOwn / 16 * 32 + owner * kOwn % 16 + tile + 16 * half;
        use(dim, output_[tile][2 * half + column]);
      }
    }
  }

 private:
  static constexpr int kGroups = kHeadDim / kQuantizedGroupDims;

  // Four codes of keys as signed bytes: of the dims that this lane has in the first and in the second half of a group.
  static __device__ uint2 key_bytes(const Keys& keys, int place) {
    if constexpr (kKeyBits == 8) {
      return keys.template at<uint2>(place);
    } else {
      const uint32_t codes = keys.template at<uint32_t>(place);
      return make_uint2(codes << 4 & 0xf0f0f0f0u ^ 0x88888888u, codes & 0xf0f0f0f0u ^ 0x88888888u);
    }
  }

  // The scales of all groups of a token of keys, times 16.
  static __device__ void load_scales(const Keys& keys, int token, float (&scales)[kGroups]) {
    uint32_t bytes;
    if constexpr (kGroups == 4) {
      bytes = *reinterpret_cast<const uint32_t*>(&keys.scales[4 * token]);
    } else {
      bytes = *reinterpret_cast<const uint16_t*>(&keys.scales[2 * token]);
    }
#pragma unroll
    for (int g = 0; g < kGroups; g += 2) {
      const float2 both = as_floats(__byte_perm(bytes, 0, g == 0 ? 0x1404 : 0x3424) >> 1);
      scales[g] = both.x;
      scales[g + 1] = both.y;
    }
  }

  __device__ void score(const Keys& keys, float (&scores)[4]) const {
    constexpr int32_t kMagic = 0x4b400000;  // 1.5 * 2^23: an integer in its low bits is one that is added to it
    constexpr float kMagicValue = 12582912.0f;
    const int row = lane_ / 4;
    const int first = kKeyBits == 8 ? 8 * (lane_ % 4) : 4 * (lane_ % 4);
    const int places[2] = {Keys::place(row, first), Keys::place(row + 8, first)};
    float scales[2][kGroups];
    load_scales(keys, row, scales[0]);
    load_scales(keys, row + 8, scales[1]);
    float sums[2][4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int turn = g * code_row_bytes(kQuantizedGroupDims, kKeyBits);
      const uint2 low = key_bytes(keys, places[0] ^ turn);
      const uint2 high = key_bytes(keys, places[1] ^ turn);
      const uint32_t fragment[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
      for (int digit = 0; digit < 2; ++digit) {
        int32_t products[4] = {kMagic, kMagic, kMagic, kMagic};
        ptx::mma_m16n8k32_s8(products, fragment, query_[digit][g][0], query_[digit][g][1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[digit][i] = fmaf(__int_as_float(products[i]) - kMagicValue, scales[i / 2][g], sums[digit][i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = fmaf(sums[0][i], 256.0f, sums[1][i]) * factors_[i % 2];
  }

  // The scales of this lane's group for two neighbouring tokens of values, over kValueUnit.
  __device__ __half2 value_scales(const Values& values, int token) const {
    uint32_t bytes;
    if constexpr (kGroups == 4) {
      const uint2 both = *reinterpret_cast<const uint2*>(&values.scales[4 * token]);
      bytes = __byte_perm(both.x, both.y, lane_ / 8 * 0x1111 + 0x4400);
    } else {
      bytes = __byte_perm(*reinterpret_cast<const uint32_t*>(&values.scales[2 * token]), 0, lane_ / 16 * 0x1111 + 0x2200);
    }
    return __hmul2(as_halves(bytes >> 1 & 0x7f807f80u), __float2half2_rn(0x1p-4f / kValueUnit));
  }

  // Values of two tokens as pairs of f16: `first` and `second` hold codes of the same dims.
  static __device__ void expand(uint32_t first, uint32_t second, __half2 scales, uint32_t* pairs) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t both = __byte_perm(first, second, half == 0 ? 0x5410 : 0x7632);
      if constexpr (kValueBits == 8) {
        // 1024 + 128 + code, with the code's sign bit turned over.
        const __half2 offset = __float2half2_rn(1152.0f);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const __half2 code = __hsub2(as_halves(both >> 8 * i & 0x00ff00ffu ^ 0x64806480u), offset);
          pairs[2 * half + i] = as_word(__hmul2(code, scales));
        }
      } else {
        // 64.5 + code. That times the step, less 72 times the step, is rounded once, and is exact.
        const __half2 offset = __hmul2(scales, __float2half2_rn(-72.0f));
        const uint32_t moved[4] = {both << 4, both, both >> 4, both >> 8};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pairs[4 * half + i] = as_word(__hfma2(as_halves(moved[i] & 0x00f000f0u | 0x54085408u), scales, offset));
        }
      }
    }
  }

  __device__ void add(const Values& values, uint32_t first_weights, uint32_t second_weights) {
    constexpr int kBytes = kHeadDim / 8 * kValueBits / 8;  // of each token that this lane takes
    const int token = 2 * (lane_ % 4);
    const int first_byte = lane_ / 4 * kBytes;
    uint32_t fragments[kHeadDim / 8][2];  // [dim, half of the tokens]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const __half2 scales = value_scales(values, token + 8 * half);
      const int places[2] = {Values::place(token + 8 * half, first_byte), Values::place(token + 8 * half + 1, first_byte)};
      uint32_t words[2][kBytes / 4];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_words(values, places[i], words[i]);
#pragma unroll
      for (int word = 0; word < kBytes / 4; ++word) {
        constexpr int kDims = 32 / kValueBits;
        uint32_t pairs[kDims];
        expand(words[0][word], words[1][word], scales, pairs);
#pragma unroll
        for (int i = 0; i < kDims; ++i) fragments[kDims * word + i][half] = pairs[i];
      }
    }
#pragma unroll
    for (int tile = 0; tile < kHeadDim / 16; ++tile) {
      const uint32_t fragment[4] = {fragments[2 * tile][0], fragments[2 * tile + 1][0], fragments[2 * tile][1],
                                    fragments[2 * tile + 1][1]};
      ptx::mma_m16n8k16<__half>(output_[tile], fragment, first_weights, second_weights);
    }
  }

  template <int kWords>
  static __device__ void load_words(const Values& values, int place, uint32_t (&words)[kWords]) {
    if constexpr (kWords == 4) {
      const uint4 all = values.template at<uint4>(place);
      words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else if constexpr (kWords == 2) {
      const uint2 all = values.template at<uint2>(place);
      words[0] = all.x, words[1] = all.y;
    } else {
      words[0] = values.template at<uint32_t>(place);
    }
  }

  static __device__ __half2 as_halves(uint32_t word) { return *reinterpret_cast<const __half2*>(&word); }
  static __device__ float2 as_floats(uint32_t word) { return __half22float2(as_halves(word)); }
  static __device__ uint32_t as_word(__half2 halves) { return *reinterpret_cast<const uint32_t*>(&halves); }

  ColumnSoftmax<1> softmax_;
  const int lane_;
  float factors_[2];
  uint32_t query_[2][kGroups][2];
  float output_[kHeadDim / 16][4] = {};
};

}  // namespace kv
