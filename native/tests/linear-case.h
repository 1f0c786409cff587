// Random cases of `linear`, a loop in double precision, and every build of the kernel.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/linear/linear.h"
#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {

#if defined(__x86_64__)
namespace emulated {
void linear(const LayersOfInput&, Workers&);
}
#endif

// With the input sizes below, batches of at most this many rows take the path of few rows.
constexpr size_t kFewRows = 16;

struct LinearBuild {
  std::string name;
  std::function<void(const LayersOfInput&, Workers&)> run;
};

#if defined(__x86_64__)
inline LinearBuild emulated_tiles() {
  return {"emulated tiles", emulated::linear};
}
#endif

// Calls body(build) for each instruction set that this processor has, and for tile registers that are emulated.
template <class Body>
void on_every_linear(Body&& body) {
  on_every_isa([&](Isa isa) {
    body(LinearBuild{isa_name(isa), [isa](const LayersOfInput& layers, Workers& workers) {
                       ExecutionContext context{workers, isa};
                       CHECK(linear(std::vector<LinearArguments>(layers.begin(), layers.end()), context).ok());
                     }});
  });
#if defined(__x86_64__)
  if (runs(Isa::avx512)) body(emulated_tiles());
#endif
}

// A strided matrix whose gaps hold NaN, so that a read past a row's end shows in the result.
struct Matrix {
  DType dtype;
  size_t rows, columns, stride;
  std::vector<uint8_t> bytes;

  Matrix(DType dtype, size_t rows, size_t columns, size_t gap)
      : dtype(dtype),
        rows(rows),
        columns(columns),
        stride(columns + gap),
        bytes(rows * stride * byte_size(dtype)) {
    for (size_t i = 0; i < rows * stride; ++i) write(i, NAN);
  }

  template <class Draw>
  void fill(Draw&& draw) {
    for (size_t row = 0; row < rows; ++row) {
      for (size_t column = 0; column < columns; ++column) write(row * stride + column, draw());
    }
  }

  void write(size_t element, float value) {
    write_element(dtype, bytes, static_cast<int64_t>(element), value);
  }

  double at(size_t row, size_t column) const {
    return read_element(dtype, bytes, static_cast<int64_t>(row * stride + column));
  }

  std::vector<double> row(size_t row) const {
    return read_elements(dtype, bytes, static_cast<int64_t>(row * stride), static_cast<int64_t>(columns));
  }
};

struct Case {
  size_t tokens, in, out, gap;
  DType dtype, weight_dtype, bias_dtype;
  bool bias, accumulate, integers;
  // Powers of two that input and weights are multiplied by.
  int input_exponent = 0, weight_exponent = 0;
  // The second half of the features takes back what the first half adds, but for a few bits.
  bool cancelling = false;
};

struct Problem {
  Case shape;
  Matrix input, weight, bias, before;

  Problem(const Case& c, std::mt19937& random)
      : shape(c),
        input(c.dtype, c.tokens, c.in, c.gap),
        weight(c.weight_dtype, c.out, c.in, 2 * c.gap),
        bias(c.bias_dtype, 1, c.out, 0),
        before(c.dtype, c.tokens, c.out, c.gap) {
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> small(-2, 2);
    const auto draw = [&] { return c.integers ? static_cast<float>(small(random)) : normal(random); };
    for (Matrix* matrix : {&input, &weight, &bias, &before}) matrix->fill(draw);
    if (c.input_exponent != 0 || c.weight_exponent != 0) {
      input.fill([&] { return std::ldexp(normal(random), c.input_exponent); });
      weight.fill([&] { return std::ldexp(normal(random), c.weight_exponent); });
    }
    if (c.cancelling) cancel();
  }

  void cancel() {
    const size_t half = shape.in / 2;
    for (size_t k = 0; k < half; ++k) {
      for (size_t row = 0; row < shape.tokens; ++row) {
        input.write(row * input.stride + half + k, -(1 + 0x1p-20f) * static_cast<float>(input.at(row, k)));
      }
      for (size_t out = 0; out < shape.out; ++out) {
        weight.write(out * weight.stride + half + k, static_cast<float>(weight.at(out, k)));
      }
    }
  }

  // The rows `first .. first + tokens` alone, by a given build and number of threads.
  Matrix run(const LinearBuild& build, int threads, size_t first, size_t tokens, MemoryReading reading = {}) const {
    Matrix output = before;
    Workers workers(threads);
    workers.set_memory_reading(reading);
    const LinearArguments a = arguments(first, tokens, output);
    build.run({&a, 1}, workers);
    return output;
  }

  LinearArguments arguments(size_t first, size_t tokens, Matrix& output) const {
    LinearArguments a;
    a.input = input.bytes.data() + first * input.stride * byte_size(shape.dtype);
    a.input_stride = static_cast<int64_t>(input.stride);
    a.output = output.bytes.data() + first * output.stride * byte_size(shape.dtype);
    a.output_stride = static_cast<int64_t>(output.stride);
    a.dtype = shape.dtype;
    a.weight = weight.bytes.data();
    a.weight_stride = static_cast<int64_t>(weight.stride);
    a.weight_dtype = shape.weight_dtype;
    a.bias = shape.bias ? bias.bytes.data() : nullptr;
    a.bias_dtype = shape.bias_dtype;
    a.tokens = static_cast<int64_t>(tokens);
    a.in_features = static_cast<int64_t>(shape.in);
    a.out_features = static_cast<int64_t>(shape.out);
    a.accumulate = shape.accumulate;
    return a;
  }
};

// The reference of one output, and how far f32 arithmetic and the output's type may take it from there.
struct Expectation {
  double value, tolerance;
};

inline Expectation expected(const Problem& problem, size_t row, size_t out, const double* input, const double* weight) {
  const Case& c = problem.shape;
  double value = 0, magnitude = 0;
  const auto add = [&](double term) {
    value += term;
    magnitude += std::fabs(term);
  };
  for (size_t k = 0; k < c.in; ++k) add(input[k] * weight[k]);
  if (c.bias) add(problem.bias.at(0, out));
  if (c.accumulate) add(problem.before.at(row, out));
  // A sum of n products in any order, with or without fused multiply-adds, is within n u / (1 - n u)
  // of the sum of magnitudes (Higham 2002, section 3.1), u = 2^-24. Small integers are exact in f32.
  const double terms = static_cast<double>(c.in) + 2;
  const double u = std::ldexp(1.0, -24);
  // Below f32's normal numbers, each of them is off by at most half the smallest number.
  const double summing = c.integers ? 0.0 : terms * u / (1 - terms * u) * magnitude + terms * 0x1p-150;
  const double largest = std::fabs(value) + summing;
  const double storing = c.dtype == DType::f32 ? 0.0 : unit_roundoff(c.dtype) * largest + 0x1p-25;
  return {value, summing + storing};
}

// `[token, out]`
inline std::vector<Expectation> reference(const Problem& problem) {
  const Case& c = problem.shape;
  std::vector<std::vector<double>> weight;
  for (size_t out = 0; out < c.out; ++out) weight.push_back(problem.weight.row(out));
  std::vector<Expectation> all;
  for (size_t row = 0; row < c.tokens; ++row) {
    const std::vector<double> input = problem.input.row(row);
    for (size_t out = 0; out < c.out; ++out) {
      all.push_back(expected(problem, row, out, input.data(), weight[out].data()));
    }
  }
  return all;
}

inline bool near_reference(const Problem& problem, const std::vector<Expectation>& wanted, const Matrix& output,
                    const LinearBuild& build) {
  const Case& c = problem.shape;
  for (size_t row = 0; row < c.tokens; ++row) {
    for (size_t out = 0; out < c.out; ++out) {
      const Expectation& want = wanted[row * c.out + out];
      const double given = output.at(row, out);
      if (std::fabs(given - want.value) <= want.tolerance) continue;
      std::fprintf(stderr, "%s, %zu tokens, %zu in, %zu out, dtype %d, weight %d: ", build.name.c_str(), c.tokens, c.in,
                   c.out, static_cast<int>(c.dtype), static_cast<int>(c.weight_dtype));
      std::fprintf(stderr, "[%zu, %zu] = %.9g, not %.9g +- %.3g\n", row, out, given, want.value,
                   want.tolerance);
      return false;
    }
  }
  return true;
}

inline bool gaps_untouched(const Matrix& matrix) {
  for (size_t row = 0; row < matrix.rows; ++row) {
    for (size_t column = matrix.columns; column < matrix.stride; ++column) {
      if (!std::isnan(matrix.at(row, column))) return false;
    }
  }
  return true;
}

inline bool same_rows(const Matrix& a, const Matrix& b, size_t first, size_t rows) {
  const size_t row_bytes = a.stride * byte_size(a.dtype);
  return std::equal(a.bytes.data() + first * row_bytes, a.bytes.data() + (first + rows) * row_bytes,
                    b.bytes.data() + first * row_bytes);
}

// The last row, computed with fewer neighbours on the same side of the boundary between few rows and many.
inline bool independent_of_neighbours(const Problem& problem, const Matrix& output, const LinearBuild& build) {
  const size_t tokens = problem.shape.tokens;
  if (tokens == 0) return true;
  const size_t alone = tokens <= kFewRows ? 1 : kFewRows + 1;
  return same_rows(output, problem.run(build, 1, tokens - alone, alone), tokens - alone, alone);
}

}  // namespace kv
