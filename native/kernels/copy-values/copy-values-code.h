// The scale and the codes of a token. Every device makes the same bytes.
#pragma once

#include <cstdint>

namespace kv {
namespace KV_ISA {

// The bits of a bf16 that is no less than the step, of which `step` are the f32's bits.
constexpr uint16_t scale_bits(uint32_t step) {
  if (step >= 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((step + 0xffffu) >> 16);
}

}  // namespace KV_ISA
}  // namespace kv
