// The linear kernels of few rows and of some tens against float64: what lies beside the inputs is NaN, and every output
// is poisoned first.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "kernels/linear/linear-few-rows.cuda.h"
#include "kernels/linear/linear-skinny.cuda.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/cuda/kernels/for-python.cuda.h"
#include "tests/kernel-testing.h"

namespace kv::tests {
namespace {

constexpr int64_t kGuardRows = 2;

// Elements of any of the three float types, NaN at first, in host memory and on the device.
class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t stride)
      : dtype_(dtype), stride_(stride), bytes_(rows * stride * width(), 0xff), device_(bytes_) {}

  int64_t width() const { return static_cast<int64_t>(byte_size(dtype_)); }
  int64_t stride() const { return stride_; }
  void* row(int64_t row) const { return device_.get() + row * stride_ * width(); }
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  double get(int64_t row, int64_t column) const { return read_element(dtype_, bytes_, row * stride_ + column); }

  void fill(int64_t rows, int64_t columns, Random& random) {
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        write_element(dtype_, bytes_, row * stride_ + column, normal(random));
      }
    }
    device_.upload(bytes_);
  }
  void download() { bytes_ = device_.host(); }

 private:
  DType dtype_;
  int64_t stride_;
  std::vector<uint8_t> bytes_;
  DeviceBuffer<uint8_t> device_;
};

enum class Kernel { few_rows, skinny };
constexpr int64_t kWideRows = 64;  // of more, the kernel of tens of rows adds in another order

std::vector<uint8_t> in_reverse(std::vector<uint8_t> bytes, int64_t rows, int64_t row_bytes) {
  for (int64_t row = 0; row < rows / 2; ++row) {
    const auto first = bytes.begin() + row * row_bytes;
    std::swap_ranges(first, first + row_bytes, bytes.begin() + (rows - 1 - row) * row_bytes);
  }
  return bytes;
}

void run(Kernel kernel, const LinearLayers& layers) {
  if (kernel == Kernel::few_rows) return succeeds(linear_few_rows(layers, nullptr));
  const DeviceBuffer<uint8_t> workspace(sm90a::linear_skinny_workspace(layers), 0xff);
  succeeds(sm90a::linear_skinny(layers, workspace.get(), nullptr));
  succeeds(cudaDeviceSynchronize());
}

struct Case {
  std::string name;
  Kernel kernel;
  DType dtype;
  DType weight_dtype;
  int64_t tokens;
  int64_t in;
  int64_t out;
  bool has_bias;
  bool accumulate;
};

Outcome multiply(const Case& test, Random& random) {
  Matrix input(test.dtype, test.tokens + 1, test.in + 8 * (random() % 3));
  Matrix weight(test.weight_dtype, test.out + 1, test.in + 8 * (random() % 3));
  const DType bias_dtype = random() % 2 == 0 ? test.dtype : DType::f32;
  Matrix bias(bias_dtype, 1, test.out + 1);
  Matrix output(test.dtype, test.tokens + kGuardRows, test.out + random() % 3);
  input.fill(test.tokens, test.in, random);
  weight.fill(test.out, test.in, random);
  bias.fill(1, test.out, random);
  if (test.accumulate) output.fill(test.tokens, test.out, random);
  const std::vector<uint8_t> before = output.bytes();
  const DeviceBuffer<uint8_t> alone(before);
  std::vector<double> exact(test.tokens * test.out), magnitude(exact.size());
  for (int64_t i = 0; i < test.tokens * test.out; ++i) {
    const int64_t row = i / test.out;
    const int64_t out = i % test.out;
    const auto add = [&](double term) {
      exact[i] += term;
      magnitude[i] += std::abs(term);
    };
    if (test.has_bias) add(bias.get(0, out));
    if (test.accumulate) add(output.get(row, out));
    for (int64_t k = 0; k < test.in; ++k) add(input.get(row, k) * weight.get(out, k));
  }

  LinearArguments arguments;
  arguments.input = input.row(0);
  arguments.input_stride = input.stride();
  arguments.output = output.row(0);
  arguments.output_stride = output.stride();
  arguments.dtype = test.dtype;
  arguments.weight = weight.row(0);
  arguments.weight_stride = weight.stride();
  arguments.weight_at_rest = random() % 2 == 0;
  arguments.weight_dtype = test.weight_dtype;
  arguments.bias = test.has_bias ? bias.row(0) : nullptr;
  arguments.bias_dtype = bias_dtype;
  arguments.tokens = test.tokens;
  arguments.in_features = test.in;
  arguments.out_features = test.out;
  arguments.accumulate = test.accumulate;
  Outcome outcome;
  outcome.expect(fits_few_rows(arguments), "does not fit the kernel");
  run(test.kernel, {{arguments}, 1});
  // The others of a batch must not change a bit: row by row, or in reverse.
  const int64_t output_row = output.stride() * output.width();
  const bool is_wide = test.kernel == Kernel::skinny && test.tokens > kWideRows;
  const int64_t input_row = input.stride() * input.width();
  const DeviceBuffer<uint8_t> reversed_input(in_reverse(input.bytes(), test.tokens, input_row));
  const DeviceBuffer<uint8_t> reversed(in_reverse(before, test.tokens, output_row));
  if (is_wide) {
    arguments.input = reversed_input.get();
    arguments.output = reversed.get();
    run(test.kernel, {{arguments}, 1});
  }
  arguments.tokens = 1;
  for (int64_t row = 0; row < test.tokens && !is_wide; ++row) {
    arguments.input = input.row(row);
    arguments.output = alone.get() + row * output_row;
    run(test.kernel, {{arguments}, 1});
  }
  succeeds(cudaDeviceSynchronize());
  output.download();
  const std::vector<uint8_t> again = is_wide ? in_reverse(reversed.host(), test.tokens, output_row) : alone.host();
  outcome.expect(output.bytes() == again, "rows differ when alone, or in reverse");

  // A tensor core may cut a sum off where it should round, so that each of n additions errs by up to 2^-23.
  const double summing = static_cast<double>(test.in + 2) * 0x1p-23;
  double worst = 0;  // as a share of the bound
  bool within = true;
  bool untouched = true;
  for (int64_t row = 0; row < test.tokens + kGuardRows; ++row) {
    for (int64_t out = 0; out < output.stride(); ++out) {
      if (row >= test.tokens || out >= test.out) {
        const int64_t at = (row * output.stride() + out) * output.width();
        untouched &= std::memcmp(&before[at], &output.bytes()[at], output.width()) == 0;
        continue;
      }
      const int64_t i = row * test.out + out;
      const double computed = summing * magnitude[i];
      const double rounding = unit_roundoff(test.dtype) * (std::abs(exact[i]) + computed) + 0x1p-25;
      const double stored = test.dtype == DType::f32 ? 0 : rounding;
      const double error = std::abs(output.get(row, out) - exact[i]);
      within &= error <= computed + stored;
      worst = std::max(worst, error / (computed + stored));
    }
  }
  outcome.expect(untouched, "wrote beside the output");
  outcome.expect(within, "an error above the bound");
  char share[40];
  std::snprintf(share, sizeof share, "%.3f of the bound", worst);
  outcome.detail = share + (outcome.passed ? "" : "; " + outcome.detail);
  return outcome;
}

// A gate and the layer that it gates, beside the same kernel's sums of both and silu of them in float64.
Outcome gate(const Case& test, Random& random) {
  Matrix input(test.dtype, test.tokens, test.in + 8 * (random() % 3));
  input.fill(test.tokens, test.in, random);
  const bool at_rest = random() % 2 == 0;
  const int64_t weight_stride = test.in + 8 * (random() % 3);
  std::deque<Matrix> weights, biases, sums, outputs;
  for (int layer = 0; layer < 2; ++layer) {
    weights.emplace_back(test.dtype, test.out, weight_stride);
    weights.back().fill(test.out, test.in, random);
  }
  const int gate_at = random() % 2;  // either may be first in memory
  LinearLayers apart, gated;
  for (int layer = 0; layer < 2; ++layer) {
    biases.emplace_back(test.dtype, 1, test.out);
    biases.back().fill(1, test.out, random);
    for (auto* list : {&sums, &outputs}) list->emplace_back(test.dtype, test.tokens + kGuardRows, test.out + random() % 3);
    LinearArguments a;
    a.input = input.row(0);
    a.input_stride = input.stride();
    a.dtype = a.weight_dtype = a.bias_dtype = test.dtype;
    a.weight = weights[layer ^ gate_at].row(0);
    a.weight_stride = weight_stride;
    a.weight_at_rest = at_rest;
    a.bias = test.has_bias ? biases.back().row(0) : nullptr;
    a.tokens = test.tokens;
    a.in_features = test.in;
    a.out_features = test.out;
    for (auto [layers, matrices] : {std::pair(&apart, &sums), std::pair(&gated, &outputs)}) {
      a.output = matrices->back().row(0);
      a.output_stride = matrices->back().stride();
      layers->layers[layers->count++] = a;
    }
  }
  gated.gated = true;
  run(test.kernel, apart);
  run(test.kernel, gated);
  succeeds(cudaDeviceSynchronize());
  for (Matrix* matrix : {&sums[0], &sums[1], &outputs[0]}) matrix->download();
  Outcome outcome;
  bool within = true;
  bool untouched = true;
  for (int64_t row = 0; row < test.tokens + kGuardRows; ++row) {
    for (int64_t out = 0; out < outputs[0].stride(); ++out) {
      const double given = outputs[0].get(row, out);
      if (row >= test.tokens || out >= test.out) {
        untouched &= std::isnan(given);
        continue;
      }
      const double sum = sums[0].get(row, out);
      const double exact = sum / (1 + std::exp(-sum)) * sums[1].get(row, out);
      within &= std::abs(given - exact) <= (9 * 0x1p-24 + unit_roundoff(test.dtype)) * std::abs(exact) + 0x1p-25;
    }
  }
  outcome.expect(untouched, "wrote beside the output");
  outcome.expect(within, "an error above the bound of swiglu");
  return outcome;
}

const char* name_of(DType dtype) { return dtype == DType::f16 ? "f16" : dtype == DType::bf16 ? "bf16" : "f32"; }

struct Sizes {
  std::vector<int64_t> tokens;
  std::vector<int64_t> in;
  std::vector<int64_t> out;
};

// Few of them, and short, when only small cases are asked for.
template <class Fits>
std::vector<Case> cases(Kernel kernel, const Sizes& sizes, Fits fits) {
  std::vector<Case> list;
  Random random(seed());
  for (const DType dtype : {DType::f16, DType::bf16, DType::f32}) {
    for (const DType weight_dtype : {DType::f16, DType::bf16}) {
      for (const int64_t tokens : sizes.tokens) {
        for (const int64_t in : sizes.in) {
          for (const int64_t out : sizes.out) {
            if (only_small_cases() && (in * out > 40000 || (tokens != 8 && tokens != 13 && tokens != 100))) continue;
            if (in * out > 1000000 && tokens != 8 && !(tokens == 100 && in == 64)) continue;
            Case test{"", kernel, dtype, weight_dtype, tokens, in, out, random() % 2 == 0, random() % 2 == 0};
            test.name = std::string(name_of(dtype)) + " x " + name_of(weight_dtype) + ", " + std::to_string(tokens) +
                        " rows, " + std::to_string(in) + " -> " + std::to_string(out) +
                        (test.has_bias ? ", bias" : "") + (test.accumulate ? ", accumulate" : "");
            if (fits(test)) list.push_back(test);
          }
        }
      }
    }
  }
  return list;
}

std::vector<Case> few_rows_cases() {
  const Sizes sizes{{1, 3, 8, 13, 16, 40}, {8, 344, 2048, 4104}, {1, 100, 2000, 4500}};
  return cases(Kernel::few_rows, sizes, [](const Case&) { return true; });
}

std::vector<Case> skinny_cases() {
  const Sizes sizes{{9, 13, 33, 64, 100, 130}, {64, 320, 2048}, {1, 100, 2000, 20000, 30000}};
  return cases(Kernel::skinny, sizes,
               [](const Case& test) { return test.dtype == test.weight_dtype || test.dtype == DType::f32; });
}

__global__ void read_all(const uint4* data, int64_t count, unsigned* sink) {
  constexpr int kLoads = 8;
  unsigned seen = 0;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kLoads - 1) * threads < count; i += kLoads * threads) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) loaded[load] = __ldcs(data + i + load * threads);
#pragma unroll
    for (const uint4& each : loaded) seen ^= each.x ^ each.y ^ each.z ^ each.w;
  }
  if (seen == 0x9e3779b9u) *sink = seen;
}

}  // namespace

TEST("few-row linear layers agree with float64") { run_cases(few_rows_cases(), multiply); }

TEST("linear layers of some tens of rows agree with float64") { run_cases(skinny_cases(), multiply); }

TEST("linear layers that gate others agree with swiglu of their sums") {
  std::vector<Case> list = few_rows_cases();
  for (const Case& test : skinny_cases()) {
    if (test.out % 8 == 0) list.push_back(test);
  }
  const auto refused = [](const Case& test) { return test.dtype != test.weight_dtype || test.accumulate; };
  list.erase(std::remove_if(list.begin(), list.end(), refused), list.end());
  run_cases(list, gate);
}

}  // namespace kv::tests

// For torch-linear.py; every tensor is contiguous. Returns 0, or prints why not.
// `sizes`: rows, in, input dtype, weight dtype (0 f32, 1 f16, 2 bf16), and the outputs of each layer.
// `pointers`: input, and the weight and the output of each layer.
KV_FOR_PYTHON int kv_linear(int layers, const int64_t* sizes, void* const* pointers, void* stream) {
  constexpr kv::DType kDTypes[] = {kv::DType::f32, kv::DType::f16, kv::DType::bf16};
  kv::LinearLayers together;
  for (; together.count < layers; ++together.count) {
    kv::LinearArguments& layer = together.layers[together.count];
    layer.tokens = sizes[0];
    layer.in_features = layer.input_stride = layer.weight_stride = sizes[1];
    layer.out_features = layer.output_stride = sizes[4 + together.count];
    layer.dtype = kDTypes[sizes[2]];
    layer.weight_dtype = kDTypes[sizes[3]];
    layer.input = pointers[0];
    layer.weight = pointers[1 + 2 * together.count];
    layer.weight_at_rest = true;
    layer.output = pointers[2 + 2 * together.count];
  }
  return kv::tests::result_for_python(kv::linear_few_rows(together, static_cast<cudaStream_t>(stream)));
}

// Reads `bytes` bytes and does nothing with them; `sink` holds four bytes.
KV_FOR_PYTHON int kv_read(const void* data, int64_t bytes, void* sink, void* stream) {
  kv::tests::read_all<<<132 * 8, 512, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), bytes / 16, static_cast<unsigned*>(sink));
  return kv::tests::result_for_python(kv::launch_status());
}
