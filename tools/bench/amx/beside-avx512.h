// What the programs of this folder share: random bits, and times on tile registers beside AVX-512.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "runtime/execution.h"
#include "runtime/isa.h"

inline uint64_t random_bits() {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

// Ends the program where there is no AMX.
inline void expect_amx() {
  if (kv::runs(kv::Isa::amx)) return;
  std::fputs(kv::amx_state() == kv::AmxState::refused ? "the system refuses tile registers\n" : "no AMX here\n", stderr);
  std::exit(1);
}

// Times run(context) on both in turn, each behind an untimed call of prepare(), and prints the milliseconds of all calls but
// the first `warm_ups` as the last members of a JSON object.
template <class Prepare, class Run>
void print_beside_avx512(kv::Workers& workers, int warm_ups, int samples, const Prepare& prepare, const Run& run) {
  constexpr struct { const char* name; kv::Isa isa; } kSets[] = {{"amx", kv::Isa::amx}, {"avx512", kv::Isa::avx512}};
  std::vector<double> times[2];
  for (int sample = -warm_ups; sample < samples; ++sample) {
    for (int which = 0; which < 2; ++which) {
      prepare();
      kv::ExecutionContext context{workers, kSets[which].isa};
      const auto start = std::chrono::steady_clock::now();
      if (!run(context).ok()) std::abort();
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      if (sample >= 0) times[which].push_back(time.count());
    }
  }
  for (int which = 0; which < 2; ++which) {
    std::printf(", \"%s\": [", kSets[which].name);
    for (size_t i = 0; i < times[which].size(); ++i) std::printf("%s%.4f", i == 0 ? "" : ", ", times[which][i]);
    std::printf("]");
  }
  std::printf("}\n");
  std::fflush(stdout);
}
