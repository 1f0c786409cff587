// Times `linear` and a reference on the same shape, in turn, and prints the milliseconds of each as JSON.
//
//   linear-openblas TOKENS IN OUT DTYPE THREADS SAMPLES
//
// The reference of many rows is OpenBLAS sgemm with f32 weights; of one row, a loop that reads the weights
// and does nothing with them. One row goes through copies of the weights larger than any cache, as a model's
// layers do; many rows stay with one copy.
#include <cblas.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/linear/linear.h"

extern "C" char* openblas_get_config();
extern "C" char* openblas_get_corename();

namespace {

constexpr int kUntimed = 2;
constexpr double kLeastMilliseconds = 10;
// OpenBLAS's threads keep their cores busy for about 26 ms after the last call.
constexpr auto kPause = std::chrono::milliseconds(50);
constexpr int64_t kManyBytes = 192 << 20;

struct Shape {
  int64_t tokens, in, out;
  kv::DType dtype;

  int64_t weights() const { return in * out; }
  int64_t weight_bytes() const { return weights() * static_cast<int64_t>(byte_size(dtype)); }
  int64_t copies() const { return tokens == 1 ? kManyBytes / weight_bytes() : 1; }
};

kv::DType dtype_of(const std::string& name) {
  return name == "f16" ? kv::DType::f16 : name == "bf16" ? kv::DType::bf16 : kv::DType::f32;
}

template <class Work>
double milliseconds(Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// The clock of this core now: dependent additions take one cycle each.
double gigahertz() {
  constexpr long kAdditions = 50'000'000;
  unsigned long sum = 0;
  const double time = milliseconds([&] {
    for (long i = 0; i < kAdditions; ++i) asm volatile("add $1, %0" : "+r"(sum));
  });
  return static_cast<double>(kAdditions) / time / 1e6;
}

// Puts each worker on a core of its own, among those that the process may use.
void pin(kv::Workers& workers) {
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  std::atomic<int> pinned{0};
  workers.for_each(static_cast<size_t>(workers.count()), [&](size_t, int worker) {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cores[static_cast<size_t>(worker) % cores.size()], &own);
    pthread_setaffinity_np(pthread_self(), sizeof own, &own);
    // Nobody takes a second index before everybody has one.
    ++pinned;
    while (pinned < workers.count()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

class Comparison {
 public:
  Comparison(const Shape& shape, int threads)
      : shape_(shape),
        workers_(threads),
        input_(static_cast<size_t>(shape.tokens * shape.in), 0.5f),
        output_(static_cast<size_t>(shape.tokens * shape.out)),
        weight_(static_cast<size_t>(shape.weight_bytes() * shape.copies())),
        reference_weight_(shape.tokens == 1 ? 0 : static_cast<size_t>(shape.weights()), 0.5f) {
    // Times do not depend on values; 0x3838… is an ordinary number in each of the three types.
    std::memset(weight_.data(), 0x38, weight_.size());
    if (shape.tokens > 1) multiply();  // OpenBLAS starts its threads, on any core
    pin(workers_);
  }

  double ours() {
    return each_copy([&](const uint8_t* weight) {
      kv::LinearArguments a;
      a.input = input_.data();
      a.input_stride = shape_.in;
      a.output = output_.data();
      a.output_stride = shape_.out;
      a.weight = weight;
      a.weight_stride = shape_.in;
      a.weight_dtype = shape_.dtype;
      a.tokens = shape_.tokens;
      a.in_features = shape_.in;
      a.out_features = shape_.out;
      kv::ExecutionContext context{workers_, kv::best_isa()};
      if (!kv::linear(a, context).ok()) std::abort();
    });
  }

  double reference() {
    return each_copy([&](const uint8_t* weight) { shape_.tokens == 1 ? read(weight) : multiply(); });
  }

 private:
  template <class Work>
  double each_copy(Work&& work) {
    std::this_thread::sleep_for(kPause);
    work(weight_.data());
    int64_t calls = 0;
    double time = 0;
    while (time < kLeastMilliseconds) {
      time += milliseconds([&] {
        for (int64_t copy = 0; copy < shape_.copies(); ++copy) {
          work(weight_.data() + copy * shape_.weight_bytes());
        }
      });
      calls += shape_.copies();
    }
    return time / static_cast<double>(calls);
  }

  void multiply() {
    const int tokens = static_cast<int>(shape_.tokens), in = static_cast<int>(shape_.in);
    const int out = static_cast<int>(shape_.out);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tokens, out, in, 1, input_.data(), in,
                reference_weight_.data(), in, 0, output_.data(), out);
  }

  void read(const uint8_t* weight) {
    const int64_t words = shape_.weight_bytes() / 8;
    const int64_t parts = workers_.count();
    workers_.for_each(static_cast<size_t>(parts), [&](size_t index, int) {
      const int64_t part = static_cast<int64_t>(index);
      uint64_t mixed = 0;
      for (int64_t i = words * part / parts; i < words * (part + 1) / parts; ++i) {
        uint64_t word;
        std::memcpy(&word, weight + 8 * i, 8);
        mixed ^= word;
      }
      asm volatile("" : : "r"(mixed));
    });
  }

  Shape shape_;
  kv::Workers workers_;
  std::vector<float> input_, output_;
  std::vector<uint8_t> weight_;
  std::vector<float> reference_weight_;
};

void print(const char* name, const std::vector<double>& values) {
  std::printf("\"%s\": [", name);
  for (size_t i = 0; i < values.size(); ++i) std::printf("%s%.6f", i == 0 ? "" : ", ", values[i]);
  std::printf("], ");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: %s TOKENS IN OUT f32|f16|bf16 THREADS SAMPLES\n", argv[0]);
    return 2;
  }
  const Shape shape{std::atoll(argv[1]), std::atoll(argv[2]), std::atoll(argv[3]), dtype_of(argv[4])};
  const double clock = gigahertz();
  Comparison comparison(shape, std::atoi(argv[5]));
  std::vector<double> ours, reference;
  for (int sample = -kUntimed; sample < std::atoi(argv[6]); ++sample) {
    const double our_time = comparison.ours();
    const double reference_time = comparison.reference();
    if (sample < 0) continue;
    ours.push_back(our_time);
    reference.push_back(reference_time);
  }
  std::printf("{");
  print("ours", ours);
  print("reference", reference);
  std::printf("\"gigahertz\": %.3f, \"instructionSet\": \"%s\", ", clock, kv::isa_name(kv::best_isa()));
  std::printf("\"library\": \"%s\", \"kernels\": \"%s\"}\n", openblas_get_config(), openblas_get_corename());
}
