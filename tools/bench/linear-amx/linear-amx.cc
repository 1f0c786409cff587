// `linear` of many rows on tile registers beside AVX-512, in turn, f32 input. Prints the medians, and how far apart the
// results are. Needs the native build and a processor with AMX:
//
//   g++ -std=c++17 -O2 -DKV_AMX -Inative tools/bench/linear-amx/linear-amx.cc native/build/libkv_core.a -pthread -o linear-amx
//   ./linear-amx THREADS [TOKENS [SAMPLES]]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/linear/linear.h"
#include "runtime/isa.h"

namespace {

// The layers of a Llama of 1.1B and of one of 8B.
constexpr int64_t kShapes[][2] = {{2048, 2048}, {2048, 256}, {2048, 5632}, {5632, 2048}, {4096, 4096}, {4096, 14336}};

double milliseconds_of(const kv::LinearArguments& a, kv::Workers& workers, kv::Isa isa) {
  kv::ExecutionContext context{workers, isa};
  const auto start = std::chrono::steady_clock::now();
  if (!kv::linear({a}, context).ok()) std::abort();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int count, char** words) {
  const int threads = count > 1 ? std::atoi(words[1]) : 1;
  const int64_t tokens = count > 2 ? std::atoi(words[2]) : 512;
  const int samples = count > 3 ? std::atoi(words[3]) : 9;
  if (!kv::runs(kv::Isa::amx)) {
    std::puts(kv::amx_state() == kv::AmxState::refused ? "the system refuses tile registers" : "no AMX here");
    return 1;
  }
  kv::Workers workers(threads);
  std::mt19937 random(1);
  for (const auto& [in, out] : kShapes) {
    for (const kv::DType dtype : {kv::DType::bf16, kv::DType::f16, kv::DType::f32}) {
      std::normal_distribution<float> normal;
      std::vector<float> input(static_cast<size_t>(tokens * in)), outputs[2];
      for (float& x : input) x = normal(random);
      // The bits of numbers near 1 in each dtype, with random signs and last bits.
      std::vector<uint8_t> weight(static_cast<size_t>(in * out) * kv::byte_size(dtype));
      for (size_t i = 0; i < static_cast<size_t>(in * out); ++i) {
        const uint32_t bits = static_cast<uint32_t>(random());
        if (dtype == kv::DType::f32) {
          reinterpret_cast<uint32_t*>(weight.data())[i] = 0x3c000000u | (bits & 0x807fffffu);
        } else {
          const uint32_t one = dtype == kv::DType::f16 ? 0x2000u : 0x3c00u, last = dtype == kv::DType::f16 ? 0x83ffu : 0x807fu;
          reinterpret_cast<uint16_t*>(weight.data())[i] = static_cast<uint16_t>(one | (bits & last));
        }
      }
      kv::LinearArguments a;
      a.input = input.data();
      a.input_stride = a.in_features = in;
      a.output_stride = a.out_features = out;
      a.weight = weight.data();
      a.weight_stride = in;
      a.weight_dtype = dtype;
      a.tokens = tokens;
      std::vector<double> times[2];
      for (int sample = -1; sample < samples; ++sample) {
        for (int which = 0; which < 2; ++which) {
          outputs[which].resize(static_cast<size_t>(tokens * out));
          a.output = outputs[which].data();
          const double time = milliseconds_of(a, workers, which == 0 ? kv::Isa::avx512 : kv::Isa::amx);
          if (sample >= 0) times[which].push_back(time);
        }
      }
      double apart = 0, largest = 0;
      for (size_t i = 0; i < outputs[0].size(); ++i) {
        apart = std::max(apart, std::fabs(double{outputs[0][i]} - outputs[1][i]));
        largest = std::max(largest, std::fabs(double{outputs[0][i]}));
      }
      const double before = median(times[0]), now = median(times[1]);
      const double gigaflop = 2e-6 * static_cast<double>(tokens * in * out);
      const char* name = dtype == kv::DType::bf16 ? "bf16" : dtype == kv::DType::f16 ? "f16" : "f32";
      std::printf("%lld x %lld -> %lld, %s weights, %d threads: avx512 %.3f ms (%.0f GFLOP/s), amx %.3f ms (%.0f), %.2f x; apart %.1e of %.1e\n",
                  static_cast<long long>(tokens), static_cast<long long>(in), static_cast<long long>(out), name, threads, before,
                  gigaflop / before, now, gigaflop / now, before / now, apart, largest);
    }
  }
}
