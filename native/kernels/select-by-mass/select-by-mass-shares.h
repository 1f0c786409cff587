// Shares of tokens as integers, for the CPU and CUDA alike. The share of a token is e^-below of the share of the best one,
// whose score is larger by `below`. Only `below` is f32, a difference that every device rounds alike.
#pragma once

#include "kernels/select-by-mass/select-by-mass.h"
#include "shared/scores/score-order.h"

namespace kv {
namespace KV_ISA {

constexpr float kNoShareBelow = 26;
constexpr int kShareBins = 26 * 64;  // of 1/64 each, the best one's first
constexpr int kShareBits = 38;       // the best share is 2^38, so that 2^24 of them fit
constexpr uint32_t kNothingTaken = UINT32_MAX;  // no order of a number

#ifdef __CUDA_ARCH__
__device__ inline uint32_t product_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
#else
constexpr uint32_t product_high(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
#endif

// e^(-bin / 64), as 2^-octave times a number from 1 to 2. The lower byte is the octave, and the upper bytes are the
// leading bits of the number.
constexpr uint32_t bin_factor(int bin) {
  constexpr auto kHalvings = static_cast<uint64_t>(1.4426950408889634 / 64 * 0x1p40);
  const uint64_t halvings = kHalvings * static_cast<uint64_t>(bin);
  const uint64_t octave = (halvings + (uint64_t{1} << 40) - 1) >> 40;
  const uint64_t doublings = ((octave << 40) - halvings) >> 10;
  const uint64_t power = doublings * static_cast<uint64_t>(0.6931471805599453 * 0x1p30) >> 30;
  uint64_t number = uint64_t{1} << 30;
  for (uint64_t i = 13; i > 0; --i) number = (uint64_t{1} << 30) + (number * power >> 30) / i;
  return (static_cast<uint32_t>(number << 1) & ~0xffu) | static_cast<uint32_t>(octave);
}

struct BinFactors {
  uint32_t of[kShareBins] = {};
  constexpr BinFactors() {
    for (int bin = 0; bin < kShareBins; ++bin) of[bin] = bin_factor(bin);
  }
};

// In units of 2^-27. Below kNoShareBelow only.
constexpr uint32_t fixed_below(float below) { return static_cast<uint32_t>(below * 0x1p27f); }
constexpr int bin_of(uint32_t fixed) { return static_cast<int>(fixed >> 21); }

// Within a bin e^-x is 1 - x (a - b x), to 2^-25: a / 64 and b / 64^2, in units of 2^-32.
constexpr uint32_t kLinear = 67107695;
constexpr uint32_t kSquare = 520503;

// 24 bits of a share, with the octave of its bin's factor.
constexpr uint32_t share_bits(uint32_t fixed, uint32_t factor) {
  const uint32_t rest = fixed << 11;  // of the bin, as a fraction of 2^32
  const uint32_t number = factor & ~0xffu;
  return (number - product_high(number, product_high(rest, kLinear - product_high(rest, kSquare)))) >> 8;
}
// The same times 2^kShareBits.
constexpr int kPlainBits = kShareBits - 23;
constexpr uint64_t share(uint32_t bits, uint32_t octave) { return uint64_t{bits} << kPlainBits >> octave; }

// Of one number: it makes the factor of its bin.
constexpr uint64_t share_of(float below) {
  if (!(below < kNoShareBelow)) return 0;
  const uint32_t fixed = fixed_below(below);
  const uint32_t factor = bin_factor(bin_of(fixed));
  return share(share_bits(fixed, factor), factor & 0xff);
}

// most + ln(sum / 2^(kShareBits - shift)), for a sum above 0.
constexpr float log_of(float most, uint64_t sum, int shift = 0) {
  int exponent = 63;
  while (sum >> exponent == 0) --exponent;
  uint64_t number = sum << (63 - exponent) >> 32;
  uint64_t halvings = 0;
  for (int i = 0; i < 32; ++i) {
    number = number * number >> 31;
    const uint64_t carry = number >> 32;
    halvings = halvings << 1 | carry;
    number >>= carry;
  }
  const double log2 = exponent - kShareBits + shift + static_cast<double>(halvings) * 0x1p-32;
  return most + static_cast<float>(log2 * 0.6931471805599453);
}

// What the scores of a row and query head sum to.
struct HeadSum {
  float most;      // largest score
  uint64_t total;  // of all shares

  constexpr bool is_sound() const { return most == most && most < __builtin_inff(); }
};

// How much share the taken tokens must have.
constexpr uint64_t wanted_share(const HeadSum& head, float dense, double tau) {
  if (tau == 1) return head.total;
  double of_dense = 0;
  if (dense > -__builtin_inff()) {
    const uint64_t share = share_of(dense > head.most ? dense - head.most : head.most - dense);
    if (dense <= head.most) of_dense = static_cast<double>(share);
    else if (share == 0) return 0;
    else of_dense = 0x1p76 / static_cast<double>(share);
  }
  const double of_all = tau * static_cast<double>(head.total);
  uint64_t wanted = static_cast<uint64_t>(of_all);
  if (static_cast<double>(wanted) < of_all) ++wanted;
  if (wanted > head.total) wanted = head.total;
  const double already = (1 - tau) * of_dense;
  if (already >= static_cast<double>(wanted)) return 0;
  return wanted - static_cast<uint64_t>(already);
}

// The logarithm of the softmax's denominator over all keys.
constexpr float log_of_all(const HeadSum& head, float dense) {
  if (!(dense > -__builtin_inff())) return log_of(head.most, head.total);
  const uint64_t share = share_of(dense > head.most ? dense - head.most : head.most - dense);
  if (dense <= head.most) return log_of(head.most, head.total + share);
  if (share == 0) return dense;
  const double of_dense = 0x1p76 / static_cast<double>(share);
  if (of_dense < 0x1p62) return log_of(head.most, head.total + static_cast<uint64_t>(of_dense));
  return log_of(head.most, (head.total >> 16) + static_cast<uint64_t>(of_dense * 0x1p-16), 16);
}

// What a head's weights are made of, once it is known what share its tokens have.
struct HeadWeights {
  uint64_t sum;       // what shares are divided by
  float log_sum_exp;  // its logarithm
  float missing;      // the weight of the mean value

  constexpr float weight(uint64_t share) const {
    return share == 0 ? 0 : static_cast<float>(share) / static_cast<float>(sum);
  }
};
constexpr HeadWeights weights_of(const HeadSum& head, uint64_t taken, MissingMass missing) {
  if (!head.is_sound()) return {1, __builtin_nanf(""), 0};
  const uint64_t sum = missing == MissingMass::renormalise ? taken : head.total;
  if (sum == 0) return {1, -__builtin_inff(), 0};
  return {sum, log_of(head.most, sum), static_cast<float>(head.total - taken) / static_cast<float>(head.total)};
}

}  // namespace KV_ISA
}  // namespace kv
