// Scores that are too small for f32. A token's score is a sum of probabilities. It may lie far below 2^-126, and
// scores must still be in order there. A subnormal number is therefore a code: the n-th one, n 2^-149, stands for 2^e
// with e = -126 2^23 / n. Between two whole e the code is linear. A greater number is still a greater score, and the
// smallest normal number still follows the greatest subnormal one.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define KV_HOST_DEVICE __host__ __device__
#else
#define KV_HOST_DEVICE
#endif
#ifdef __CUDA_ARCH__
#define KV_ROLLED _Pragma("unroll 1")  // a loop that few inputs come to leaves the registers to others
#else
#define KV_ROLLED
#endif

namespace kv {

// f32 can add scores whose sum is at least this: of up to 128 of them, what is below 2^-126 is lost in the sum's
// rounding.
constexpr float kSmallScore = 0x1p-100f;
constexpr int kSmallestExponent = -126;                        // of a normal number
constexpr float kExponentOfFirst = kSmallestExponent * 0x1p23f;  // exponent that the first subnormal number stands for

// Functions are static, so that each instruction set has its own copy.
template <class To, class From>
KV_HOST_DEVICE static inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Real>
KV_HOST_DEVICE static inline bool is_small(Real score) {
  return score > 0 && score < static_cast<Real>(kSmallScore);
}

// The score of sum * 2^exponent. `sum` must be zero or a normal number.
KV_HOST_DEVICE static inline float score_of(float sum, int32_t exponent) {
  if (!(sum > 0)) return sum;
  const int32_t bits = same_bits<int32_t>(sum);
  const int32_t whole = exponent + (bits >> 23) - 127;
  if (whole >= kSmallestExponent) return same_bits<float>(bits + exponent * (1 << 23));
  const float fraction = same_bits<float>((bits & 0x7fffff) | 0x3f800000) - 1.0f;
  return same_bits<float>(static_cast<int32_t>(kExponentOfFirst / (static_cast<float>(whole) + fraction) + 0.5f));
}

// The value that a score stands for: mantissa * 2^exponent. The mantissa is from 1 to 2, or 0 for a score of zero.
struct WideScore {
  double mantissa;
  int32_t exponent;

  KV_HOST_DEVICE explicit WideScore(float score) : mantissa(0), exponent(INT32_MIN) {
    if (!(score > 0)) return;
    const int32_t bits = same_bits<int32_t>(score);
    if (bits >> 23 == 0) {
      const double whole_and_fraction = static_cast<double>(kExponentOfFirst) / bits;
      exponent = static_cast<int32_t>(whole_and_fraction);
      if (exponent > whole_and_fraction) --exponent;
      mantissa = 1.0 + (whole_and_fraction - exponent);
    } else {
      exponent = (bits >> 23) - 127;
      mantissa = static_cast<double>(same_bits<float>((bits & 0x7fffff) | 0x3f800000));
    }
  }

  // The value divided by 2^unit. `unit` must not be less than the score's own exponent.
  KV_HOST_DEVICE double over(int32_t unit) const {
    const int64_t shift = int64_t{exponent} - unit;
    return shift < -1000 ? 0 : mantissa * same_bits<double>((shift + 1023) << 52);
  }
};

// The sum of `count` scores divided by `divisor`, for scores whose f32 or f64 `sum` is small. score(i) is the i-th
// score.
template <class Score>
KV_HOST_DEVICE static inline float small_mean(Score score, int32_t count, int32_t divisor, double sum) {
  float largest = 0;
  KV_ROLLED
  for (int32_t i = 0; i < count; ++i) largest = score(i) > largest ? score(i) : largest;
  // `largest` is not small, so numbers have cancelled out. These were no sums of probabilities.
  if (!is_small(largest)) return static_cast<float>(sum / divisor);
  const int32_t unit = WideScore(largest).exponent;
  double wide = 0;
  KV_ROLLED
  for (int32_t i = 0; i < count; ++i) wide += WideScore(score(i)).over(unit);
  return score_of(static_cast<float>(wide / divisor), unit);
}

}  // namespace kv
