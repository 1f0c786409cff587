// `linear` of many rows on tile registers beside AVX-512, in turn, f32 rows. Prints a line of JSON for each layer: the
// milliseconds of both. For run.mjs:
//
//   linear-amx THREADS TOKENS SAMPLES
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "beside-avx512.h"
#include "kernels/linear/linear.h"

namespace {

// The layers of a Llama of 1.1B and of one of 8B.
constexpr int64_t kShapes[][2] = {{2048, 2048}, {2048, 8192},  {8192, 2048},
                                  {4096, 4096}, {4096, 14336}, {14336, 4096}};

// Packed input of several workers lies in a ring, whose memory is new to the first calls.
constexpr int kRingCalls = 10;

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
  std::printf("{\"tokens\": %lld, \"inputs\": %lld, \"outputs\": %lld, \"dtype\": \"%s\", \"threads\": %d",
              static_cast<long long>(tokens), static_cast<long long>(in), static_cast<long long>(out), f16 ? "f16" : "bf16",
              workers.count());
  const auto poison = [&] { std::memset(output.data(), 0xff, output.size() * sizeof(float)); };
  print_beside_avx512(workers, workers.count() == 1 ? 1 : kRingCalls, samples, poison,
                      [&](kv::ExecutionContext& context) { return kv::linear({a}, context); });
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  expect_amx();
  kv::Workers workers(std::atoi(words[1]));
  for (const auto& [in, out] : kShapes) {
    for (const kv::DType dtype : {kv::DType::bf16, kv::DType::f16}) {
      time_layer(std::atoi(words[2]), in, out, dtype, workers, std::atoi(words[3]));
    }
  }
}
