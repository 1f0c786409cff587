// Products of rows, in f32 and f64.
#pragma once

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {

typedef double VecDouble __attribute__((vector_size(kLanes * 8)));

inline VecDouble load(const double* p) {
  VecDouble v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(double* p, VecDouble v) { std::memcpy(p, &v, sizeof v); }

// Rounds up to a multiple of what add_products computes at once, for either type.
constexpr int64_t padded(int64_t size) { return (size + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }

// The sum of all lanes.
inline double horizontal_sum(VecDouble v) {
  double lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

inline VecDouble load_doubles(const double* p) { return load(p); }
inline VecDouble load_doubles(const float* p) { return __builtin_convertvector(load(p), VecDouble); }

template <class T>
inline double dot(const T* a, const double* b, int64_t size) {
  VecDouble sums = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) sums += load_doubles(a + i) * load(b + i);
  double sum = horizontal_sum(sums);
  for (; i < size; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// `size` must be a multiple of kLanes.
inline float dot(const float* a, const float* b, int64_t size) {
  Vec sums = {};
  for (int64_t i = 0; i < size; i += kLanes) sums += load(a + i) * load(b + i);
  return horizontal_sum(sums);
}

// to[r, c] += sum over `count` rows of rows[i, r] * rows[i, c], for the rows r from `first` to `end` and the columns
// up to `last_column(r + 3)`. `first` and `end` must be multiples of 4. Rows of `rows` and of `to` are `stride`
// apart.
template <class T, class LastColumn>
inline void add_products(const T* rows, int64_t stride, int64_t count, int64_t first, int64_t end, T* to,
                         LastColumn&& last_column) {
  using V = decltype(load(rows));
  constexpr int kColumns = sizeof(T) == 4 ? 2 : 1;  // bounded by registers: there are 16 without AVX-512
  for (int64_t r = first; r < end; r += 4) {
    for (int64_t c = 0; c <= last_column(r + 3); c += kColumns * kLanes) {
      V sums[4][kColumns];
      for (int i = 0; i < 4; ++i) {
        for (int v = 0; v < kColumns; ++v) sums[i][v] = load(to + (r + i) * stride + c + v * kLanes);
      }
      for (int64_t k = 0; k < count; ++k) {
        const T* row = rows + k * stride;
#pragma GCC unroll 4
        for (int v = 0; v < kColumns; ++v) {
          const V right = load(row + c + v * kLanes);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sums[i][v] += row[r + i] * right;
        }
      }
      for (int i = 0; i < 4; ++i) {
        for (int v = 0; v < kColumns; ++v) store(to + (r + i) * stride + c + v * kLanes, sums[i][v]);
      }
    }
  }
}

// Overwrites the lower triangle of a positive definite matrix by its Cholesky factor, row by row. For any other
// matrix, the result is NaN from some row on.
inline void factor(double* matrix, int64_t size, int64_t stride) {
  for (int64_t row = 0; row < size; ++row) {
    double* of_row = matrix + row * stride;
    for (int64_t column = 0; column <= row; ++column) {
      const double* of_column = matrix + column * stride;
      const double rest = of_row[column] - dot(of_row, of_column, column);
      of_row[column] = column == row ? __builtin_sqrt(rest) : rest / of_column[column];
    }
  }
}

// Solves the equations with the factor, in place.
inline void solve(const double* factor, int64_t size, int64_t stride, double* solution) {
  for (int64_t row = 0; row < size; ++row) {
    solution[row] = (solution[row] - dot(factor + row * stride, solution, row)) / factor[row * stride + row];
  }
  for (int64_t row = size - 1; row >= 0; --row) {
    solution[row] /= factor[row * stride + row];
    for (int64_t k = 0; k < row; ++k) solution[k] -= factor[row * stride + k] * solution[row];
  }
}

}  // namespace KV_ISA
}  // namespace kv
