#include "kernels/embedding/embedding.h"

#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class T>
void widen_row(const T* row, float* output, int64_t features) {
  int64_t i = 0;
  for (; i + kLanes <= features; i += kLanes) store(output + i, load(row + i));
  for (; i < features; ++i) output[i] = to_float(row[i]);
}

template <class T>
void write_nan(void* output, int64_t start, int64_t features) {
  T* row = static_cast<T*>(output) + start;
  for (int64_t i = 0; i < features; ++i) from_float(row + i, __builtin_nanf(""));
}

template <class T>
void gather_rows(const EmbeddingArguments& a, Workers& workers) {
  const bool copies = a.output_dtype == a.table_dtype;
  workers.for_each(static_cast<size_t>(a.tokens), [&](size_t index, int) {
    const int64_t token = static_cast<int64_t>(index);
    const int64_t start = token * a.output_stride;
    const int64_t from = row_of(a, token);
    if (from < 0 || from >= a.rows) {
      return copies ? write_nan<T>(a.output, start, a.features) : write_nan<float>(a.output, start, a.features);
    }
    const T* row = static_cast<const T*>(a.table) + from * a.table_stride;
    if (copies) {
      T* output = static_cast<T*>(a.output) + start;
      std::memcpy(output, row, static_cast<size_t>(a.features) * sizeof(T));
    } else {
      widen_row(row, static_cast<float*>(a.output) + start, a.features);
    }
  });
}

}  // namespace

void embedding(const EmbeddingArguments& a, Workers& workers) {
  with_float_type(a.table_dtype, [&](auto element) { gather_rows<decltype(element)>(a, workers); });
}

}  // namespace KV_ISA
}  // namespace kv
