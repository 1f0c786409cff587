// The tensor-core product of 16 outputs' weights with up to eight rows of input, as one warp holds them. A lane has
// eight neighbouring features of the input row lane / 4 and of the outputs lane / 4 and lane / 4 + 8; four lanes
// have a line of 32. Which feature meets which slot of the tensor cores' operands does not matter as long as input
// and weights agree.
#pragma once

#include <type_traits>

#include "ptx/mma.cuda.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {

constexpr int kTileOuts = 16;
constexpr int kOperandRows = 8;
constexpr int kLaneFeatures = 8;
constexpr int kLineFeatures = 32;

template <class T>
struct alignas(16) LaneFeatures {
  T element[kLaneFeatures];
};

// Input of the weights' own 16-bit type.
template <class W>
class SameTypeOperand {
 public:
  __device__ void set(const LaneFeatures<W>& input) { input_ = reinterpret_cast<const uint4&>(input); }

  // products [out, row] += weights * input^T, in the layout of mma's results
  __device__ void multiply(const LaneFeatures<W> (&weights)[2], float (&products)[4]) const {
    const auto& low = reinterpret_cast<const uint4&>(weights[0]);
    const auto& high = reinterpret_cast<const uint4&>(weights[1]);
    ptx::mma_m16n8k16<W>(products, {low.x, high.x, low.y, high.y}, input_.x, input_.y);
    ptx::mma_m16n8k16<W>(products, {low.z, high.z, low.w, high.w}, input_.z, input_.w);
  }

 private:
  uint4 input_;
};

// Any other input, as tf32, which holds 16-bit floats exactly, and an f32 as the sum of three parts: the leading
// 11 bits, the 11 after them, and the last two of 24.
template <class T, class W>
class Tf32Operand {
 public:
  __device__ void set(const LaneFeatures<T>& input) {
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) {
      float rest = to_float(input.element[i]);
#pragma unroll
      for (auto& part : parts_) {
        part[i] = __float_as_uint(rest) & 0xffffe000u;
        rest = isfinite(rest) ? rest - __uint_as_float(part[i]) : 0.0f;
      }
    }
  }

  __device__ void multiply(const LaneFeatures<W> (&weights)[2], float (&products)[4]) const {
#pragma unroll
    for (int i = 0; i < kLaneFeatures; i += 2) {
      uint32_t a[4];
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
        a[slot] = __float_as_uint(to_float(weights[slot % 2].element[i + slot / 2]));
      }
#pragma unroll
      for (int part = kParts - 1; part >= 0; --part) {
        ptx::mma_m16n8k8(products, a, parts_[part][i], parts_[part][i + 1]);
      }
    }
  }

 private:
  static constexpr int kParts = std::is_same_v<T, float> ? 3 : 1;

  uint32_t parts_[kParts][kLaneFeatures];
};

template <class T, class W>
using Operand = std::conditional_t<std::is_same_v<T, W>, SameTypeOperand<W>, Tf32Operand<T, W>>;

}  // namespace kv
