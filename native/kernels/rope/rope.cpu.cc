#include "kernels/rope/rope.h"

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

typedef double VecDouble __attribute__((vector_size(kLanes * 8)));

// Cosines and sines of angles in radians, to about 1 ulp while |angle| < 2^20. Far positions give angles that f32
// cannot hold, so the nearest multiple of pi/2 is subtracted in double precision.
inline void cosine_and_sine(VecDouble angle, Vec* cosine, Vec* sine) {
  // Adding 1.5 * 2^52 rounds to an integer. The first part of pi/2 has 33 bits, so its multiples are exact.
  const VecDouble shifted = angle * 0.63661977236758134308 + 0x1.8p52;
  const VecDouble turns = shifted - 0x1.8p52;
  const VecDouble reduced = (angle - turns * 1.57079632673412561417e+00) - turns * 6.07710050650619224932e-11;
  const VecInt quadrant = __builtin_convertvector(turns, VecInt);
  const Vec r = __builtin_convertvector(reduced, Vec);
  const Vec r2 = r * r;
  // Minimax polynomials on [-pi/4, pi/4].
  const Vec sine_part = ((-1.9515295891e-4f * r2 + 8.3321608736e-3f) * r2 - 1.6666654611e-1f) * r2 * r + r;
  const Vec cosine_tail = (2.443315711809948e-5f * r2 - 1.388731625493765e-3f) * r2 + 4.166664568298827e-2f;
  const Vec cosine_part = cosine_tail * r2 * r2 - 0.5f * r2 + 1.0f;
  const VecInt odd = (quadrant & 1) == 1;
  const VecInt sine_sign = (quadrant & 2) << 30;
  const VecInt cosine_sign = ((quadrant + 1) & 2) << 30;
  const Vec s = odd ? cosine_part : sine_part;
  const Vec c = odd ? sine_part : cosine_part;
  *sine = reinterpret_cast<Vec>(reinterpret_cast<VecInt>(s) ^ sine_sign);
  *cosine = reinterpret_cast<Vec>(reinterpret_cast<VecInt>(c) ^ cosine_sign);
}

// Computes the scaled cosine and sine of every pair at one position. Both arrays have room up to a multiple of
// kLanes.
inline void fill_turns(const RopeArguments& a, int32_t position, float* cosines, float* sines) {
  for (int64_t i = 0; i < a.pairs; i += kLanes) {
    const int64_t count = a.pairs - i < kLanes ? a.pairs - i : kLanes;
    Vec frequency = {};
    std::memcpy(&frequency, a.inverse_frequencies + i, static_cast<size_t>(count) * sizeof(float));
    // The product of a 32-bit position and a 24-bit frequency is exact up to position 2^29.
    const VecDouble angle = __builtin_convertvector(frequency, VecDouble) * static_cast<double>(position);
    Vec cosine;
    Vec sine;
    cosine_and_sine(angle, &cosine, &sine);
    store(cosines + i, cosine * a.attention_scale);
    store(sines + i, sine * a.attention_scale);
  }
}

// Spreads [pair] tables over interleaved dims, from the last pair to the first. Each value is written twice, and the
// sine of a pair's first dim becomes negative. The tables have room for 2 * pairs.
inline void interleave_turns(int64_t pairs, float* cosines, float* sines) {
  for (int64_t i = pairs - 1; i >= 0; --i) {
    const float cosine = cosines[i];
    const float sine = sines[i];
    cosines[2 * i] = cosines[2 * i + 1] = cosine;
    sines[2 * i] = -sine;
    sines[2 * i + 1] = sine;
  }
}

template <class T>
void rotate_halves(const T* input, T* output, const float* cosines, const float* sines, int64_t pairs) {
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const Vec first = load(input + i);
    const Vec second = load(input + pairs + i);
    const Vec cosine = load(cosines + i);
    const Vec sine = load(sines + i);
    store(output + i, first * cosine - second * sine);
    store(output + pairs + i, second * cosine + first * sine);
  }
  for (; i < pairs; ++i) {
    const float first = to_float(input[i]);
    const float second = to_float(input[pairs + i]);
    from_float(output + i, first * cosines[i] - second * sines[i]);
    from_float(output + pairs + i, second * cosines[i] + first * sines[i]);
  }
}

template <class T>
void rotate_interleaved(const T* input, T* output, const float* cosines, const float* sines, int64_t pairs) {
  VecInt partner;
  for (int lane = 0; lane < kLanes; ++lane) partner[lane] = lane ^ 1;
  int64_t i = 0;
  for (; i + kLanes <= 2 * pairs; i += kLanes) {
    const Vec x = load(input + i);
    store(output + i, x * load(cosines + i) + __builtin_shuffle(x, partner) * load(sines + i));
  }
  for (; i < 2 * pairs; i += 2) {
    const float first = to_float(input[i]);
    const float second = to_float(input[i + 1]);
    from_float(output + i, first * cosines[i] + second * sines[i]);
    from_float(output + i + 1, second * cosines[i + 1] + first * sines[i + 1]);
  }
}

template <class T>
void rotate(const RopeArguments& a, Workers& workers) {
  const bool interleaved = a.convention == RopeConvention::interleaved;
  const int64_t unturned = a.head_dim - 2 * a.pairs;
  const size_t table = static_cast<size_t>(2 * a.pairs + kLanes);
  workers.for_each(static_cast<size_t>(a.tokens), [&](size_t index, int worker) {
    const int64_t token = static_cast<int64_t>(index);
    float* cosines = static_cast<float*>(workers.scratch(worker, 2 * table * sizeof(float)));
    float* sines = cosines + table;
    const T* token_input = static_cast<const T*>(a.input) + token * a.input_token_stride;
    T* token_output = static_cast<T*>(a.output) + token * a.output_token_stride;
    fill_turns(a, a.positions[token], cosines, sines);
    if (interleaved) interleave_turns(a.pairs, cosines, sines);
    for (int64_t head = 0; head < a.heads; ++head) {
      const T* input = token_input + head * a.input_head_stride;
      T* output = token_output + head * a.output_head_stride;
      if (interleaved) {
        rotate_interleaved(input, output, cosines, sines, a.pairs);
      } else {
        rotate_halves(input, output, cosines, sines, a.pairs);
      }
      if (unturned > 0 && output != input) {
        std::memcpy(output + 2 * a.pairs, input + 2 * a.pairs, static_cast<size_t>(unturned) * sizeof(T));
      }
    }
  });
}

}  // namespace

void rope(const RopeArguments& a, Workers& workers) {
  with_float_type(a.dtype, [&](auto element) { rotate<decltype(element)>(a, workers); });
}

}  // namespace KV_ISA
}  // namespace kv
