#include "kernels/load-values/load-values.h"

#include "runtime/workers.h"
#include "shared/cpu/simd.cpu.h"

namespace kv {
namespace KV_ISA {
namespace {

template <class T>
void load_block(const LoadValuesArguments& a, int64_t from, T* to) {
  const int64_t first_row = from * kLoadedBlockTokens;
  for (int32_t token = 0; token < kLoadedBlockTokens; ++token) {
    const int64_t row = first_row + token;
    T* values = to + token * a.token_stride;
    if (a.scales == nullptr) {
      std::memcpy(values, static_cast<const T*>(a.pool) + row * a.head_dim, static_cast<size_t>(a.head_dim) * sizeof(T));
      continue;
    }
    const float scale = bfloat_to_float(a.scales[row]);
    const int8_t* codes = static_cast<const int8_t*>(a.pool) + row * a.head_dim;
    for (int32_t dim = 0; dim < a.head_dim; ++dim) from_float(values + dim, static_cast<float>(codes[dim]) * scale);
  }
}

}  // namespace

void load_values(const LoadValuesArguments& a, Workers& workers) {
  workers.for_each(static_cast<size_t>(a.copies), [&](size_t i, int) {
    with_float_type(a.dtype, [&](auto element) {
      load_block(a, a.from[i], static_cast<decltype(element)*>(a.values) + a.to[i] * a.block_stride);
    });
  });
}

}  // namespace KV_ISA
}  // namespace kv
