#include "kernels/load-values/load-values.h"
#include "shared/cuda/elements.cuda.h"

namespace kv {
namespace {

constexpr int kThreads = 256;

// One thread block writes one dense block. Each thread copies one `Unit` of a row at a time.
template <class Unit>
__global__ void load_rows(const __grid_constant__ LoadValuesArguments a, int element_bytes) {
  const int units = a.head_dim * element_bytes / static_cast<int>(sizeof(Unit));
  const char* from = static_cast<const char*>(a.pool) + int64_t{a.from[blockIdx.x]} * kLoadedBlockTokens * a.head_dim * element_bytes;
  char* to = static_cast<char*>(a.values) + a.to[blockIdx.x] * a.block_stride * element_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < kLoadedBlockTokens * units; i += kThreads) {
    const int64_t row = i / units;
    reinterpret_cast<Unit*>(to + row * a.token_stride * element_bytes)[i % units] = reinterpret_cast<const Unit*>(from)[i];
  }
}

template <class T>
__global__ void load_codes(const __grid_constant__ LoadValuesArguments a) {
  const int64_t first_row = int64_t{a.from[blockIdx.x]} * kLoadedBlockTokens;
  const int8_t* codes = static_cast<const int8_t*>(a.pool) + first_row * a.head_dim;
  T* values = static_cast<T*>(a.values) + a.to[blockIdx.x] * a.block_stride;
  for (int i = static_cast<int>(threadIdx.x); i < kLoadedBlockTokens * a.head_dim; i += kThreads) {
    const int64_t row = i / a.head_dim;
    const float scale = __uint_as_float(static_cast<uint32_t>(a.scales[first_row + row]) << 16);
    values[row * a.token_stride + i % a.head_dim] = from_float<T>(static_cast<float>(codes[i]) * scale);
  }
}

}  // namespace

Status load_values_cuda(const LoadValuesArguments& a, ExecutionContext& context) {
  const auto grid = static_cast<unsigned>(a.copies);
  cudaStream_t stream = stream_of(context);
  if (a.scales != nullptr) {
    with_cuda_float_type(a.dtype, [&](auto element) { load_codes<decltype(element)><<<grid, kThreads, 0, stream>>>(a); });
    return launch_status();
  }
  const auto bytes = static_cast<int64_t>(byte_size(a.dtype));
  const int64_t places = (a.head_dim | a.block_stride | a.token_stride) * bytes;
  const bool in_vectors = (reinterpret_cast<uintptr_t>(a.pool) | reinterpret_cast<uintptr_t>(a.values) | static_cast<uintptr_t>(places)) % 16 == 0;
  if (in_vectors) load_rows<uint4><<<grid, kThreads, 0, stream>>>(a, static_cast<int>(bytes));
  else load_rows<uint16_t><<<grid, kThreads, 0, stream>>>(a, static_cast<int>(bytes));
  return launch_status();
}

}  // namespace kv
