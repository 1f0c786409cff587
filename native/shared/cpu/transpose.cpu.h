#pragma once

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

// Transposes rows and lanes.
template <int half = kLanes / 2>
inline void transpose(Vec (&rows)[kLanes]) {
  if constexpr (half > 0) {
    VecInt low = {};
    VecInt high = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      low[lane] = (lane & half) != 0 ? kLanes + lane - half : lane;
      high[lane] = (lane & half) != 0 ? kLanes + lane : lane + half;
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if ((row & half) != 0) continue;
      const Vec upper = rows[row];
      const Vec lower = rows[row + half];
      rows[row] = permute(upper, lower, low);
      rows[row + half] = permute(upper, lower, high);
    }
    transpose<half / 2>(rows);
  }
}

}  // namespace KV_ISA
}  // namespace kv
