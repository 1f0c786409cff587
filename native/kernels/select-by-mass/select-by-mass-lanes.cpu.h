// Shares of a vector of tokens at a time.
#pragma once

#include "kernels/select-by-mass/select-by-mass-shares.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

inline constexpr BinFactors kBinFactors;

constexpr int kUnitBins = kShareBins / static_cast<int>(kNoShareBelow);

inline uint64_t share_of_fixed(uint32_t fixed) {
  const uint32_t factor = kBinFactors.of[bin_of(fixed)];
  return share(share_bits(fixed, factor), factor & 0xff);
}

inline uint64_t share_below(float below) { return below < kNoShareBelow ? share_of_fixed(fixed_below(below)) : 0; }

typedef uint32_t VecWord __attribute__((vector_size(kLanes * 4)));
typedef uint64_t VecLong __attribute__((vector_size(kLanes * 4)));

// The bit of each lane whose integer is -1. The others are 0.
inline uint32_t bits_of(VecInt lanes) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(lanes));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(lanes)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= (static_cast<uint32_t>(lanes[i]) & 1) << i;
  return bits;
#endif
}

// words[at] of each lane.
inline VecWord gather(const uint32_t* words, VecWord at) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecWord>(
      _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), kAllLanes, reinterpret_cast<__m512i>(at), words, 4));
#elif defined(__AVX2__)
  return reinterpret_cast<VecWord>(_mm256_i32gather_epi32(reinterpret_cast<const int*>(words), reinterpret_cast<__m256i>(at), 4));
#else
  VecWord all;
  for (int i = 0; i < kLanes; ++i) all[i] = words[at[i]];
  return all;
#endif
}

// numbers[at] of the lanes whose `wanted` is -1, which alone are read, and `other` in the rest.
inline Vec gather_where(const float* numbers, VecWord at, VecInt wanted, Vec other) {
#if defined(__AVX512F__)
  return _mm512_mask_i32gather_ps(other, _mm512_movepi32_mask(reinterpret_cast<__m512i>(wanted)), reinterpret_cast<__m512i>(at), numbers, 4);
#elif defined(__AVX2__)
  return _mm256_mask_i32gather_ps(other, numbers, reinterpret_cast<__m256i>(at), reinterpret_cast<__m256>(wanted), 4);
#else
  for (int i = 0; i < kLanes; ++i) other[i] = wanted[i] != 0 ? numbers[at[i]] : other[i];
  return other;
#endif
}

// Writes `first` plus the number of each bit that is set, ascending, and gives how many there are. `to` has room for 32.
inline int32_t list_bits(uint32_t bits, int32_t first, int32_t* to) {
  int32_t count = 0;
#if defined(__AVX512F__)
  const VecInt lanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto low = static_cast<__mmask16>(bits), high = static_cast<__mmask16>(bits >> 16);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(low, reinterpret_cast<__m512i>(lanes + first)));
  count = __builtin_popcount(low);
  _mm512_storeu_si512(to + count, _mm512_maskz_compress_epi32(high, reinterpret_cast<__m512i>(lanes + (first + 16))));
  count += __builtin_popcount(high);
#else
  for (; bits != 0; bits &= bits - 1) to[count++] = first + __builtin_ctz(bits);
#endif
  return count;
}

// The products of the lower halves of each 64 bits.
inline VecLong low_products(VecLong a, VecLong b) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecLong>(_mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecLong>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & UINT32_MAX) * (b & UINT32_MAX);
#endif
}

// Of the lower halves of each 64 bits, the upper half of the product.
inline VecLong high_products(VecLong a, VecLong b) { return low_products(a, b) >> 32; }

// fixed_below of each lane.
inline VecWord fixed_lanes(Vec below) {
  const Vec scaled = below * 0x1p27f;
#if defined(__AVX512F__)
  return __builtin_convertvector(scaled, VecWord);
#else
  const VecInt large = scaled >= 0x1p31f;  // multiples of 128
  const Vec beyond = reinterpret_cast<Vec>(reinterpret_cast<VecInt>(splat(0x1p31f)) & large);
  return reinterpret_cast<VecWord>(__builtin_convertvector(scaled - beyond, VecInt) ^ (large & INT32_MIN));
#endif
}

// Shares of what the lower halves of each 64 bits hold; a factor of 0 gives none.
inline VecLong shares_of(VecLong fixed, VecLong factors) {
  const VecLong rest = fixed << 11;
  const VecLong numbers = factors & (UINT32_MAX & ~0xffu);
  const VecLong square = high_products(rest, kSquare - VecLong{});
  const VecLong bits = (numbers - high_products(numbers, high_products(rest, kLinear - square))) >> 8;
  return bits << kPlainBits >> (factors & 0xff);
}

// Shares of the even and of the odd lanes.
struct LaneShares {
  VecLong even;
  VecLong odd;

  // In the order of the lanes.
  void store(uint64_t* to) const {
    for (int i = 0; i < kLanes / 2; ++i) {
      to[2 * i] = even[i];
      to[2 * i + 1] = odd[i];
    }
  }

  // The same as f32, which has room for all bits of a share.
  Vec numbers() const {
    typedef int64_t Signed __attribute__((vector_size(kLanes * 4)));
    typedef float Half __attribute__((vector_size(kLanes * 2)));
    const Half halves[2] = {__builtin_convertvector(reinterpret_cast<Signed>(even), Half), __builtin_convertvector(reinterpret_cast<Signed>(odd), Half)};
    VecInt order = {};
    for (int i = 0; i < kLanes; ++i) order[i] = i % 2 * (kLanes / 2) + i / 2;
    Vec v;
    std::memcpy(&v, halves, sizeof v);
    return permute(v, v, order);
  }
};

// Of lanes whose `counts` is -1. The others have none, and must not be out of the bins.
inline LaneShares shares_of_fixed(VecWord fixed, VecInt counts) {
  const VecLong factors = reinterpret_cast<VecLong>(gather(kBinFactors.of, fixed >> 21) & reinterpret_cast<VecWord>(counts));
  const VecLong both = reinterpret_cast<VecLong>(fixed);
  return {shares_of(both, factors), shares_of(both >> 32, factors >> 32)};
}

// fixed_below of lanes whose `counts` is -1, and 0 of the others.
inline VecWord fixed_where(Vec below, VecInt counts) {
  return fixed_lanes(reinterpret_cast<Vec>(reinterpret_cast<VecInt>(below) & counts));
}

// share_below of each lane.
inline LaneShares shares_below(Vec below) {
  const VecInt counts = below < kNoShareBelow;
  return shares_of_fixed(fixed_where(below, counts), counts);
}

}  // namespace KV_ISA
}  // namespace kv
