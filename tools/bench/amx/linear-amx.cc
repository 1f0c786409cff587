// `linear` of many rows on tile registers beside AVX-512, in turn, f32 rows. Prints a line of JSON for each layer: the
// milliseconds of both. For run.mjs:
//
//   linear-amx THREADS TOKENS SAMPLES
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/linear/linear.h"
#include "runtime/isa.h"

namespace {

// The layers of a Llama of 1.1B and of one of 8B.
constexpr int64_t kShapes[][2] = {{2048, 2048}, {2048, 8192},  {8192, 2048},
                                  {4096, 4096}, {4096, 14336}, {14336, 4096}};

// Packed input of several workers lies in a ring, whose memory is new to the first calls.
constexpr int kRingCalls = 10;

uint64_t state = 88172645463325252u;

uint64_t random_bits() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

double milliseconds_of(const kv::LinearArguments& a, kv::Workers& workers, kv::Isa isa) {
  kv::ExecutionContext context{workers, isa};
  const auto start = std::chrono::steady_clock::now();
  if (!kv::linear({a}, context).ok()) std::abort();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

void print(const char* name, const std::vector<double>& times) {
  std::printf(", \"%s\": [", name);
  for (size_t i = 0; i < times.size(); ++i) std::printf("%s%.4f", i == 0 ? "" : ", ", times[i]);
  std::printf("]");
}

void time_layer(int64_t tokens, int64_t in, int64_t out, kv::DType dtype, kv::Workers& workers, int samples) {
  std::vector<float> input(static_cast<size_t>(tokens * in)), output(static_cast<size_t>(tokens * out));
  for (float& x : input) x = static_cast<float>(random_bits() >> 40) * 0x1p-23f - 1;
  // Numbers near 1/64 with random signs and last bits.
  std::vector<uint16_t> weight(static_cast<size_t>(in * out));
  const bool f16 = dtype == kv::DType::f16;
  for (uint16_t& x : weight) x = static_cast<uint16_t>((f16 ? 0x2400 : 0x3c80) | (random_bits() & (f16 ? 0x83ff : 0x807f)));
  kv::LinearArguments a;
  a.input = input.data();
  a.input_stride = a.in_features = in;
  a.output = output.data();
  a.output_stride = a.out_features = out;
  a.weight = weight.data();
  a.weight_stride = in;
  a.weight_dtype = dtype;
  a.tokens = tokens;
  std::vector<double> times[2];
  for (int sample = workers.count() == 1 ? -1 : -kRingCalls; sample < samples; ++sample) {
    for (int which = 0; which < 2; ++which) {
      std::memset(output.data(), 0xff, output.size() * sizeof(float));
      const double time = milliseconds_of(a, workers, which == 0 ? kv::Isa::amx : kv::Isa::avx512);
      if (sample >= 0) times[which].push_back(time);
    }
  }
  std::printf("{\"tokens\": %lld, \"inputs\": %lld, \"outputs\": %lld, \"dtype\": \"%s\", \"threads\": %d",
              static_cast<long long>(tokens), static_cast<long long>(in), static_cast<long long>(out), f16 ? "f16" : "bf16",
              workers.count());
  print("amx", times[0]);
  print("avx512", times[1]);
  std::printf("}\n");
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  if (!kv::runs(kv::Isa::amx)) {
    std::fputs(kv::amx_state() == kv::AmxState::refused ? "the system refuses tile registers\n" : "no AMX here\n", stderr);
    return 1;
  }
  kv::Workers workers(std::atoi(words[1]));
  for (const auto& [in, out] : kShapes) {
    for (const kv::DType dtype : {kv::DType::bf16, kv::DType::f16}) {
      time_layer(std::atoi(words[2]), in, out, dtype, workers, std::atoi(words[3]));
    }
  }
}
