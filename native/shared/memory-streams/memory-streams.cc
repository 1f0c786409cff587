#include "shared/memory-streams/memory-streams.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/linear/linear.h"
#include "runtime/background.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kv {
namespace {

using Clock = std::chrono::steady_clock;

#if defined(__x86_64__)

// Long rows tell the ways apart best. Some ways are fast in some passes over short ones, and not in others.
constexpr int64_t kFeatures = 4096;
constexpr int64_t kOutputs = 256;
constexpr size_t kWeightBytes = kFeatures * kOutputs * sizeof(uint16_t);
constexpr int kRounds = 8;
constexpr auto kMostTime = std::chrono::milliseconds(20);
// A way of reading wins only if it takes less than this share of the time that the first takes.
constexpr double kClearlyFaster = 0.95;

// Takes the weights out of every cache, so that the next pass reads memory.
void flush(const char* data) {
  for (size_t at = 0; at < kWeightBytes; at += 64) _mm_clflush(data + at);
  _mm_mfence();
}

#endif

struct Known {
  std::mutex mutex;
  bool begun = false;
  bool measured = false;
  MemoryReading reading;
  std::vector<std::function<void(MemoryReading)>> waiting;
};

// Never destroyed: the measuring thread may outlive static objects.
Known& known_of(Isa isa) {
  static auto* all = new Known[static_cast<int>(Isa::amx) + 1];
  return all[static_cast<int>(isa)];
}

}  // namespace

MemoryReading probe_memory_reading([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  const std::unique_ptr<char, void (*)(void*)> weight(static_cast<char*>(std::aligned_alloc(kWeightBytes, kWeightBytes)),
                                                      std::free);
  if (!weight) return kMemoryReadings[0];
  std::fill_n(weight.get(), kWeightBytes, char{0x38});
  const std::vector<float> input(kFeatures, 0.5f);
  std::vector<float> output(kOutputs);
  LinearArguments layer;
  layer.input = input.data();
  layer.input_stride = kFeatures;
  layer.output = output.data();
  layer.output_stride = kOutputs;
  layer.weight = weight.get();
  layer.weight_stride = kFeatures;
  layer.weight_dtype = DType::bf16;
  layer.tokens = 1;
  layer.in_features = kFeatures;
  layer.out_features = kOutputs;
  Workers workers(1);
  ExecutionContext context{workers, isa};
  // Another process disturbs some of the passes. The ways take turns, and each is judged by its best pass.
  constexpr size_t kCount = std::size(kMemoryReadings);
  Clock::duration best[kCount];
  std::fill_n(best, kCount, Clock::duration::max());
  const Clock::time_point begin = Clock::now();
  for (int round = 0; round < kRounds && (round == 0 || Clock::now() - begin < kMostTime); ++round) {
    for (size_t i = 0; i < kCount; ++i) {
      workers.set_memory_reading(kMemoryReadings[i]);
      flush(weight.get());
      const Clock::time_point start = Clock::now();
      if (!linear({layer}, context).ok()) return kMemoryReadings[0];
      best[i] = std::min(best[i], Clock::now() - start);
    }
  }
  const size_t fastest = static_cast<size_t>(std::min_element(best, best + kCount) - best);
  const bool clearly = static_cast<double>(best[fastest].count()) < kClearlyFaster * static_cast<double>(best[0].count());
  return kMemoryReadings[clearly ? fastest : 0];
#else
  return kMemoryReadings[0];
#endif
}

void when_memory_reading_known(Isa isa, std::function<void(MemoryReading)> use) {
  Known& known = known_of(isa);
  {
    std::unique_lock<std::mutex> lock(known.mutex);
    if (known.measured) {
      lock.unlock();
      return use(known.reading);
    }
    known.waiting.push_back(std::move(use));
    if (std::exchange(known.begun, true)) return;
  }
  run_in_background([isa, &known] {
    const MemoryReading reading = probe_memory_reading(isa);
    std::vector<std::function<void(MemoryReading)>> waiting;
    {
      std::lock_guard<std::mutex> lock(known.mutex);
      known.measured = true;
      known.reading = reading;
      waiting.swap(known.waiting);
    }
    for (const auto& each : waiting) each(reading);
  });
}

}  // namespace kv
