// Attention of up to eight query rows by one warp, over 16 keys and values at a time whose codes lie in shared memory.
// Device code (sm_80).
//
// Scores: S = Q K^T of signed bytes. The codes of a group are one operand, as they are (8 bits), or 16 * (code - 7.5) (4
// bits). The other one is the rotated query in 16 bits: its digits of 8 bits are rows 0 .. 7 and 8 .. 15. So the dot
// product over a group is exact, and is then multiplied by the group's step in f32.
// Outputs: O^T = V^T P^T, with codes as f16 numbers so small that their bits are those of the code. Weights are multiplied
// by the steps of each group before, in f16.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "ptx/arithmetic.cuda.h"
#include "ptx/matrix-load.cuda.h"
#include "ptx/mma-s8.cuda.h"
#include "ptx/mma.cuda.h"
#include "shared/quantized-blocks/query-digits.cuda.h"

namespace kv {

constexpr int kQuantizedStepTokens = 16;  // keys and values of a step

// 16 tokens of a block of keys, or of values, in shared memory. The 16-byte chunks of each 128 bytes are permuted so that
// the same chunk of eight tokens is in different banks.
template <int kHeadDim, int kBits>
struct CodeTile {
  static constexpr int kRowChunks = code_row_bytes(kHeadDim, kBits) / 16;
  static constexpr int kChunks = kQuantizedStepTokens * kRowChunks;
  static constexpr int kGroups = kHeadDim / kQuantizedGroupDims;

  alignas(128) uint8_t codes[kChunks * 16];
  alignas(16) uint8_t scales[kQuantizedStepTokens * kGroups];

  // Where a chunk of the block's bytes lies. That of another chunk of the same token differs by an exclusive or.
  static __device__ int place(int chunk) { return (chunk ^ chunk / 8 % kRowChunks) * 16; }
  static __device__ int place(int token, int chunk) { return place(token * kRowChunks + chunk); }
};

// The steps of 16 tokens as a warp multiplies by them.
template <int kGroups>
struct StepScales {
  alignas(16) float keys[kQuantizedStepTokens][kGroups];            // times 16
  alignas(16) uint32_t values[kQuantizedStepTokens / 2][kGroups];  // two tokens in f16, times 16 * value_unit_
};

// A thread holds the scores of row lane / 4, and outputs of rows 2 * (lane % 4) and the next.
template <int kHeadDim, int kKeyBits, int kValueBits>
class QuantizedWarp {
  static constexpr int kGroups = kHeadDim / kQuantizedGroupDims;
  static constexpr int kTiles = kHeadDim / 16;

 public:
  using Keys = CodeTile<kHeadDim, kKeyBits>;
  using Values = CodeTile<kHeadDim, kValueBits>;
  using Scales = StepScales<kGroups>;

  __device__ QuantizedWarp(const QueryDigits<kHeadDim>& query, Scales& scales)
      : query_(&query.digits[threadIdx.x % 16][threadIdx.x % 32 / 16 * 16]), scales_(scales), lane_(threadIdx.x % 32) {
    // 2^-4 twice: that of steps, and that of codes of 4 bits.
    score_unit_ = query.units[lane_ / 4] * kLog2E * (kKeyBits == 4 ? 0x1p-8f : 0x1p-4f);
  }

  __device__ void step(const Keys& keys, const Values& values) {
    uint32_t codes[Keys::kRowChunks / 2][4];
    load(keys, codes);
    share_value_scales(values);
    share_key_scales(keys);
    __syncwarp();
    float weights[4];
    score(codes, weights);
    observe(weights);
    weigh(weights);
    add(values, as_halves(ptx::pack<__half>(weights[0], weights[1])), as_halves(ptx::pack<__half>(weights[2], weights[3])));
  }

  // Calls use_row(row, reference, sum) with what the warp knows of each row, each row once, then use(row, dim, outputs) for
  // all neighbouring dims that this thread has. Outputs are not normalised. Must be called once, after the last step.
  template <typename UseRow, typename Use>
  __device__ void finish(const UseRow& use_row, const Use& use) {
    sum_ += __shfl_xor_sync(kFullWarp, sum_, 1);
    sum_ += __shfl_xor_sync(kFullWarp, sum_, 2);
    if (lane_ % 4 == 0) use_row(lane_ / 4, reference_, sum_);
    const float unit = 0x1p-4f / __low2float(value_unit_);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float code_unit = unit * (kValueBits == 8 ? 0x1p24f : tile % 2 == 0 ? 0x1p23f : 0x1p19f);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        use(2 * (lane_ % 4) + column, 16 * tile + 2 * (lane_ / 4),
            make_float2(output_[tile][column] * code_unit, output_[tile][2 + column] * code_unit));
      }
    }
  }

 private:
  static constexpr unsigned kFullWarp = 0xffffffffu;
  static constexpr float kLog2E = 1.44269504f;
  static constexpr float kSlack = 8.0f;          // weights are at most 2^8
  static constexpr float kMostStep = 128.0f;     // of values, times their unit, so that weights times steps stay in f16
  static constexpr float kUsualStep = 16.0f;

  // Each scale is read and converted by one lane, for all.
  __device__ void share_key_scales(const Keys& keys) {
    if constexpr (kGroups == 4) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(&keys.scales[2 * lane_]);
      const float2 steps = __half22float2(as_halves(__byte_perm(two, 0, 0x4140) << 7));
      *reinterpret_cast<float2*>(&scales_.keys[0][2 * lane_]) = steps;
    } else {
      scales_.keys[0][lane_] = __half2float(__ushort_as_half(static_cast<uint16_t>(keys.scales[lane_] << 7)));
    }
  }

  __device__ void share_value_scales(const Values& values) {
    const int word = lane_ % (8 * kGroups);
    const uint8_t* first = &values.scales[word / kGroups * 2 * kGroups + word % kGroups];
    const __half2 steps = as_halves((first[0] | first[kGroups] << 16) << 7);
    __half2 in_units = __hmul2(steps, value_unit_);
    if (__any_sync(kFullWarp, !__hble2(in_units, __float2half2_rn(kMostStep)))) {
      lower_value_unit(steps);
      in_units = __hmul2(steps, value_unit_);
    }
    if (lane_ < 8 * kGroups) (&scales_.values[0][0])[lane_] = as_word(in_units);
  }

  // So that the largest of these steps becomes kUsualStep, or up to twice as much. NaN among them changes nothing.
  __device__ void lower_value_unit(__half2 steps) {
    constexpr unsigned kOne = 127u << 23;
    const float own = fmaxf(fmaxf(__low2float(steps), __high2float(steps)), 0.0f);
    const unsigned exponent = __reduce_max_sync(kFullWarp, __float_as_uint(own)) & 0x7f800000u;
    const float unit = fminf(__low2float(value_unit_), __uint_as_float(__float_as_uint(kUsualStep) + kOne - exponent));
    const float correction = unit * __uint_as_float(2 * kOne - __float_as_uint(__low2float(value_unit_)));
    value_unit_ = __float2half2_rn(unit);
    scale_outputs(correction, correction);
  }

  __device__ void scale_outputs(float first, float second) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (auto& tile : output_) tile[i] *= i % 2 == 0 ? first : second;
    }
  }

  // Of 8 bits, both chunks of a group of eight tokens, then those of the next eight. Of 4 bits, a group of eight tokens,
  // of the next eight, and then the next group of both.
  __device__ void load(const Keys& keys, uint32_t (&codes)[Keys::kRowChunks / 2][4]) const {
    const int matrix = lane_ / 8;
    const int token = lane_ % 8 + (kKeyBits == 8 ? matrix / 2 : matrix % 2) * 8;
    const int place = Keys::place(token, kKeyBits == 8 ? matrix % 2 : matrix / 2);
#pragma unroll
    for (int pair = 0; pair < Keys::kRowChunks / 2; ++pair) ptx::load_matrices(codes[pair], &keys.codes[place ^ pair * 32]);
  }

  // Scores of the tokens 2 * (lane % 4), the next one, and those 8 after them, over score_unit_.
  __device__ void score(const uint32_t (&codes)[Keys::kRowChunks / 2][4], float (&scores)[4]) const {
    int32_t products[kGroups][2][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      uint32_t query[4];
      ptx::load_matrices(query, query_ + 32 * g);
#pragma unroll
      for (int tokens = 0; tokens < 2; ++tokens) {
        if constexpr (kKeyBits == 8) {
          ptx::mma_m16n8k32_s8(products[g][tokens], query, codes[g][2 * tokens], codes[g][2 * tokens + 1]);
        } else {
          const uint32_t both = codes[g / 2][g % 2 * 2 + tokens];
          ptx::mma_m16n8k32_s8(products[g][tokens], query, ptx::mask_and_flip(both << 4, 0xf0f0f0f0u, 0x88888888u),
                               ptx::mask_and_flip(both, 0xf0f0f0f0u, 0x88888888u));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* steps = scales_.keys[i / 2 * 8 + 2 * (lane_ % 4) + i % 2];
      scores[i] = 0.0f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int32_t(&digits)[4] = products[g][i / 2];
        scores[i] = fmaf(static_cast<float>(256 * digits[i % 2] + digits[2 + i % 2]), steps[g], scores[i]);
      }
    }
  }

  // Takes scores into account: moves the row's reference if they are much higher.
  __device__ void observe(const float (&scores)[4]) {
    // Rounded up. Otherwise the weights of large scores could exceed 2^8 by any factor.
    float maximum = __fmul_ru(fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])), score_unit_);
    if (!__any_sync(kFullWarp, maximum > reference_ + kSlack)) return;
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 2));
    const bool moves = maximum > reference_ + kSlack;
    const float correction = moves ? ptx::exp2_approximate(reference_ - maximum) : 1.0f;
    if (moves) reference_ = maximum;
    sum_ *= correction;
    const int row_lane = lane_ % 4 * 8;
    scale_outputs(__shfl_sync(kFullWarp, correction, row_lane), __shfl_sync(kFullWarp, correction, row_lane + 4));
  }

  __device__ void weigh(float (&scores)[4]) {
    const float offset = reference_ == -INFINITY ? 0.0f : reference_;
#pragma unroll
    for (float& score : scores) score = ptx::exp2_approximate(fmaf(score, score_unit_, -offset));
    sum_ += (scores[0] + scores[1]) + (scores[2] + scores[3]);
  }

  // The weights are those of the lane's two first and two last tokens. A code becomes the last bits of an f16 number below
  // 2^-14. What it is too much by is taken off in the same sums, which then stay small.
  __device__ void add(const Values& values, __half2 first_weights, __half2 last_weights) {
    uint32_t weights[kGroups][2];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      weights[g][0] = as_word(__hmul2(first_weights, as_halves(scales_.values[lane_ % 4][g])));
      weights[g][1] = as_word(__hmul2(last_weights, as_halves(scales_.values[lane_ % 4 + 4][g])));
    }
    // Chunks of eight tokens, of the next eight, and the next chunks of both.
    const int place = Values::place(lane_ % 16, lane_ / 16);
#pragma unroll
    for (int chunk = 0; chunk < Values::kRowChunks; chunk += 2) {
      uint32_t codes[4];
      ptx::load_matrices_transposed(codes, &values.codes[place ^ chunk * 16]);
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const uint32_t first = codes[2 * next];
        const uint32_t last = codes[2 * next + 1];
        if constexpr (kValueBits == 8) {
          const auto code = [](uint32_t bits) { return ptx::mask_and_flip(bits, 0x00ff00ffu, 0x00800080u); };
          const uint32_t fragment[4] = {code(first), code(first >> 8), code(last), code(last >> 8)};
          add_tile(chunk + next, fragment, 0x80808080u, weights[chunk / 2]);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t mask = half == 0 ? 0x001e001eu : 0x01e001e0u;
            const uint32_t fragment[4] = {first << 1 & mask, first >> 7 & mask, last << 1 & mask, last >> 7 & mask};
            add_tile(2 * (chunk + next) + half, fragment, half == 0 ? 0x800f800fu : 0x80f080f0u, weights[chunk + next]);
          }
        }
      }
    }
  }

  __device__ void add_tile(int tile, const uint32_t (&codes)[4], uint32_t negative_middle, const uint32_t (&weights)[2]) {
    const uint32_t middles[4] = {negative_middle, negative_middle, negative_middle, negative_middle};
    ptx::mma_m16n8k16<__half>(output_[tile], middles, weights[0], weights[1]);
    ptx::mma_m16n8k16<__half>(output_[tile], codes, weights[0], weights[1]);
  }

  static __device__ __half2 as_halves(uint32_t word) { return *reinterpret_cast<const __half2*>(&word); }
  static __device__ uint32_t as_word(__half2 halves) { return *reinterpret_cast<const uint32_t*>(&halves); }

  const int8_t* query_;  // where this lane reads digits of a group
  Scales& scales_;
  const int lane_;
  float score_unit_;
  float reference_ = -INFINITY;  // an exponent of 2
  float sum_ = 0.0f;             // of this lane's weights
  __half2 value_unit_ = __float2half2_rn(0x1p15f);
  float output_[kTiles][4] = {};
};

}  // namespace kv
