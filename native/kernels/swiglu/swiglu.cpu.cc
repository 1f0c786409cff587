#include "kernels/swiglu/swiglu.h"

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

// Features of a task. A decode step has few tokens, so a row is shared too.
constexpr int64_t kChunk = 2048;

inline Vec silu(Vec x) {
  // e^-|x| cannot overflow. silu(x) is x / (1 + e^-|x|), times e^-|x| if x is negative.
  const VecInt negative = x < Vec{};
  const Vec decay = exponential(negative ? x : -x);
  return x * (negative ? decay : splat(1.0f)) / (1.0f + decay);
}

template <class T>
void gate_chunk(const T* gate, const T* up, T* output, int64_t features) {
  int64_t i = 0;
  for (; i + kLanes <= features; i += kLanes) store(output + i, silu(load(gate + i)) * load(up + i));
  for (; i < features; ++i) from_float(output + i, silu(splat(to_float(gate[i])))[0] * to_float(up[i]));
}

template <class T>
void gate_rows(const SwigluArguments& a, Workers& workers) {
  const int64_t chunks = (a.features + kChunk - 1) / kChunk;
  workers.for_each(static_cast<size_t>(a.tokens * chunks), [&](size_t index, int) {
    const int64_t token = static_cast<int64_t>(index) / chunks;
    const int64_t start = static_cast<int64_t>(index) % chunks * kChunk;
    const int64_t rest = a.features - start;
    gate_chunk(static_cast<const T*>(a.gate) + token * a.gate_stride + start,
               static_cast<const T*>(a.up) + token * a.up_stride + start,
               static_cast<T*>(a.output) + token * a.output_stride + start, rest < kChunk ? rest : kChunk);
  });
}

}  // namespace

void swiglu(const SwigluArguments& a, Workers& workers) {
  with_float_type(a.dtype, [&](auto element) { gate_rows<decltype(element)>(a, workers); });
}

}  // namespace KV_ISA
}  // namespace kv
