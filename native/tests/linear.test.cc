// Compares `linear` with a loop in double precision over random shapes, strides, types and thread
// counts, on every instruction set that this processor has.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/linear/linear.h"
#include "tests/check.h"
#include "tests/kernel-testing.h"

namespace kv {
namespace {

// With the input sizes below, batches of at most this many rows take the path of few rows.
constexpr size_t kFewRows = 16;

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
  }

  // The rows `first .. first + tokens` alone, on a given instruction set and number of threads.
  Matrix run(Isa isa, int threads, size_t first, size_t tokens) const {
    Matrix output = before;
    Workers workers(threads);
    ExecutionContext context{workers, isa};
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
    CHECK(linear({a}, context).ok());
    return output;
  }
};

// The reference of one output, and how far f32 arithmetic and the output's type may take it from there.
struct Expectation {
  double value, tolerance;
};

Expectation expected(const Problem& problem, size_t row, size_t out, const double* input, const double* weight) {
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
  const double summing = c.integers ? 0.0 : terms * u / (1 - terms * u) * magnitude;
  const double largest = std::fabs(value) + summing;
  const double storing = c.dtype == DType::f32 ? 0.0 : unit_roundoff(c.dtype) * largest + 0x1p-25;
  return {value, summing + storing};
}

// `[token, out]`
std::vector<Expectation> reference(const Problem& problem) {
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

bool near_reference(const Problem& problem, const std::vector<Expectation>& wanted, const Matrix& output,
                    const char* isa) {
  const Case& c = problem.shape;
  for (size_t row = 0; row < c.tokens; ++row) {
    for (size_t out = 0; out < c.out; ++out) {
      const Expectation& want = wanted[row * c.out + out];
      const double given = output.at(row, out);
      if (std::fabs(given - want.value) <= want.tolerance) continue;
      std::fprintf(stderr, "%s, %zu tokens, %zu in, %zu out, dtype %d, weight %d: ", isa, c.tokens, c.in,
                   c.out, static_cast<int>(c.dtype), static_cast<int>(c.weight_dtype));
      std::fprintf(stderr, "[%zu, %zu] = %.9g, not %.9g +- %.3g\n", row, out, given, want.value,
                   want.tolerance);
      return false;
    }
  }
  return true;
}

bool gaps_untouched(const Matrix& matrix) {
  for (size_t row = 0; row < matrix.rows; ++row) {
    for (size_t column = matrix.columns; column < matrix.stride; ++column) {
      if (!std::isnan(matrix.at(row, column))) return false;
    }
  }
  return true;
}

bool same_rows(const Matrix& a, const Matrix& b, size_t first, size_t rows) {
  const size_t row_bytes = a.stride * byte_size(a.dtype);
  return std::equal(a.bytes.data() + first * row_bytes, a.bytes.data() + (first + rows) * row_bytes,
                    b.bytes.data() + first * row_bytes);
}

// The last row, computed with fewer neighbours on the same side of the boundary between few rows and many.
bool independent_of_neighbours(const Problem& problem, const Matrix& output, Isa isa) {
  const size_t tokens = problem.shape.tokens;
  if (tokens == 0) return true;
  const size_t alone = tokens <= kFewRows ? 1 : kFewRows + 1;
  return same_rows(output, problem.run(isa, 1, tokens - alone, alone), tokens - alone, alone);
}

void check(const Case& c, std::mt19937& random) {
  const Problem problem(c, random);
  const std::vector<Expectation> wanted = reference(problem);
  on_every_isa([&](Isa isa) {
    const Matrix output = problem.run(isa, 1, 0, c.tokens);
    CHECK(near_reference(problem, wanted, output, isa_name(isa)));
    CHECK(gaps_untouched(output));
    CHECK(same_rows(output, problem.run(isa, 3, 0, c.tokens), 0, c.tokens));
    CHECK(independent_of_neighbours(problem, output, isa));
  });
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};

}  // namespace
}  // namespace kv

using namespace kv;

TEST("linear is near a double-precision loop, whatever the shape, strides, types, threads and neighbours") {
  std::mt19937 random(20240611);
  const size_t sizes[] = {1, 2, 7, 15, 16, 17, 31, 33, 64, 96, 127, 129, 320};
  const size_t tokens[] = {1, 2, 3, 5, 8, 9, 14, 15, 16, 17, 18, 28, 29, 43, 70};
  const auto any = [&](const auto& from) { return from[random() % (sizeof(from) / sizeof(from[0]))]; };
  const auto one_in = [&](unsigned n) { return random() % n == 0; };
  for (int i = 0; i < 400; ++i) {
    Case c;
    c.tokens = any(tokens);
    c.in = any(sizes);
    c.out = any(sizes);
    c.gap = random() % 4;
    c.dtype = one_in(4) ? any(kTypes) : DType::f32;
    c.weight_dtype = kTypes[i % 3];
    c.bias_dtype = any(kTypes);
    c.bias = one_in(2);
    c.accumulate = one_in(2);
    c.integers = one_in(3);
    check(c, random);
  }
}

TEST("linear widens every 16-bit weight exactly") {
  constexpr size_t kPatterns = 1 << 16;
  std::mt19937 random(5);
  for (DType dtype : {DType::f16, DType::bf16}) {
    Problem problem({1, 1, kPatterns, 0, DType::f32, dtype, DType::f32, false, false, true}, random);
    problem.input.write(0, 1.0f);
    for (size_t bits = 0; bits < kPatterns; ++bits) {
      reinterpret_cast<uint16_t*>(problem.weight.bytes.data())[bits] = static_cast<uint16_t>(bits);
    }
    on_every_isa([&](Isa isa) {
      const Matrix output = problem.run(isa, 1, 0, 1);
      size_t wrong = 0;
      for (size_t bits = 0; bits < kPatterns; ++bits) {
        const double given = output.at(0, bits), wanted = problem.weight.at(bits, 0);
        wrong += std::isnan(wanted) ? !std::isnan(given) : given != wanted;
      }
      CHECK(wrong == 0);
    });
  }
}

TEST("linear takes empty extents") {
  std::mt19937 random(7);
  const DType f32 = DType::f32;
  for (size_t tokens : {0, 3, 20}) {
    check({tokens, 8, 8, 0, f32, DType::f16, f32, true, true, false}, random);
    check({tokens, 0, 8, 0, f32, DType::f16, f32, true, true, false}, random);
    check({tokens, 8, 0, 0, f32, DType::f16, f32, true, true, false}, random);
  }
}

TEST("linear takes more rows than one pass over the weights") {
  std::mt19937 random(11);
  check({410, 8192, 3, 0, DType::f32, DType::bf16, DType::f32, false, false, true}, random);
}
