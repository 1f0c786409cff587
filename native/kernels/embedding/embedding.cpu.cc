#include "kernels/embedding/embedding.h"

#include "kernels/simd.h"

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
void gather_rows(const EmbeddingArguments& a, Workers& workers) {
  const bool copies = a.output_dtype == a.table_dtype;
  workers.for_each(static_cast<size_t>(a.tokens), [&](size_t index, int) {
    const int64_t token = static_cast<int64_t>(index);
    const T* row = static_cast<const T*>(a.table) + row_of(a, token) * a.table_stride;
    if (copies) {
      T* output = static_cast<T*>(a.output) + token * a.output_stride;
      std::memcpy(output, row, static_cast<size_t>(a.features) * sizeof(T));
    } else {
      widen_row(row, static_cast<float*>(a.output) + token * a.output_stride, a.features);
    }
  });
}

}  // namespace

void embedding(const EmbeddingArguments& a, Workers& workers) {
  with_float_type(a.table_dtype, [&](auto element) { gather_rows<decltype(element)>(a, workers); });
}

}  // namespace KV_ISA
}  // namespace kv
