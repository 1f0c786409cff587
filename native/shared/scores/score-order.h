// Integers in the order of scores, for counting and selecting by their bits. Source for every device: KV_ISA names whose.
#pragma once

#include <cstdint>
#include <cstring>

namespace kv {
namespace KV_ISA {

// NaN has no place in the order. A zero without a sign is `score + 0.0f`.
constexpr uint32_t order_of(uint32_t bits) { return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u; }
constexpr uint32_t bits_of_order(uint32_t order) { return (order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order; }

}  // namespace KV_ISA
}  // namespace kv
