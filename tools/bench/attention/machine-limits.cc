#include "machine-limits.h"

#include <chrono>
#include <cstdint>

#define KV_ISA bench
#include "shared/cpu/simd.cpu.h"

namespace bench {

using kv::bench::kLanes;
using kv::bench::Vec;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

// Enough chains to hide the latency of an addition, few enough for 16 registers.
constexpr int kChains = 12;

// Always zero, but not for the compiler.
volatile float sink = 0;

void multiply_add(int64_t steps) {
  Vec chains[kChains];
  // No chain starts at the fixed point 1, which the compiler would see through.
  for (int i = 0; i < kChains; ++i) chains[i] = kv::bench::splat(2.0f + static_cast<float>(i));
  const Vec factor = kv::bench::splat(0.999f);
  const Vec term = kv::bench::splat(0.001f);
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) chains[i] = chains[i] * factor + term;
  }
  Vec sum = {};
  for (int i = 0; i < kChains; ++i) sum += chains[i];
  sink = kv::bench::horizontal_sum(sum);
}

void read_all(const float* data, size_t floats) {
  Vec sums[8] = {};
  for (size_t at = 0; at + 8 * kLanes <= floats; at += 8 * kLanes) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] += kv::bench::load(data + at + i * kLanes);
  }
  Vec sum = {};
  for (const Vec& part : sums) sum += part;
  sink = kv::bench::horizontal_sum(sum);
}

}  // namespace

double peak_flops(kv::Workers& workers) {
  constexpr int64_t kSteps = 4'000'000;
  const size_t parts = static_cast<size_t>(workers.count());
  const double start = seconds_now();
  workers.for_each(parts, [](size_t, int) { multiply_add(kSteps); });
  return static_cast<double>(parts) * kSteps * kChains * kLanes * 2 / (seconds_now() - start);
}

double read_bandwidth(kv::Workers& workers, const void* data, size_t bytes) {
  constexpr size_t kPartBytes = size_t{1} << 20;
  const size_t parts = bytes / kPartBytes;
  const double start = seconds_now();
  workers.for_each(parts, [&](size_t part, int) {
    read_all(reinterpret_cast<const float*>(static_cast<const char*>(data) + part * kPartBytes),
             kPartBytes / sizeof(float));
  });
  return static_cast<double>(parts * kPartBytes) / (seconds_now() - start);
}

}  // namespace bench
