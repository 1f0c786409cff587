// A counter-based random generator, Philox4x32-10 (Salmon et al. 2011): a draw depends only on its seed and step.
#pragma once

#include <cstdint>

namespace kv {
namespace KV_ISA {

// Uniform over the integers below 2^53. It is constexpr, so that a CUDA device may evaluate it too.
constexpr uint64_t random_53_bits(uint64_t seed, uint64_t step) {
  uint32_t counter[4] = {static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    const uint32_t mixed_first = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
    const uint32_t mixed_second = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
    counter[0] = mixed_first;
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = mixed_second;
    counter[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return uint64_t{counter[0] >> 5} << 26 | counter[1] >> 6;
}

// Uniform in [0, 1), with 53 random bits.
inline double uniform_of(uint64_t seed, uint64_t step) {
  return static_cast<double>(random_53_bits(seed, step)) * 0x1p-53;
}

}  // namespace KV_ISA
}  // namespace kv
