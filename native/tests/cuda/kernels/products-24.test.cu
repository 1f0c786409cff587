// wgmma and wgmma.sp on blocks as the host compresses them, against integers: the metadata, the layouts in shared
// memory, the choice between dense and sparse.
#include <cmath>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/prefill-attention-24/prefill-attention-24-products.cuda.h"
#include "ptx/tensor-copy.cuda.h"
#include "ptx/wgmma.cuda.h"
#include "shared/blocks-24/blocks-24.h"
#include "tests/cuda/kernels/case-loop.h"
#include "tests/cuda/kernels/compress-24-reference.cuda.h"
#include "tests/cuda/kernels/device.cuda.h"
#include "tests/kernel-testing.h"

namespace kv::tests {
namespace {

constexpr int kThreads = 128;

// Element (row, column) of rows of 128 bytes, whose 16-byte chunks are swizzled.
constexpr int swizzled(int row, int column) { return row * 64 + (column / 8 ^ row % 8) * 8 + column % 8; }

// out[64 * panel + m, n] = block times right, by one warpgroup. A product of keys has one panel, which sums over all
// dims. `block` and `right` are as the products read them.
template <typename Element, int kDim, int N, bool kKeys>
__global__ void multiply_kernel(const uint16_t* block, int block_size, const uint32_t* metadata, bool sparse,
                                const uint16_t* right, int right_size, float* out) {
  constexpr int kPanels = kDim / 64;
  constexpr int kMostRight = (kKeys ? kPanels * N : (N + 63) / 64 * 64) * 64;
  extern __shared__ __align__(1024) uint16_t shared[];
  uint16_t* const shared_right = shared;
  uint16_t* const shared_block = shared + (kMostRight + 511) / 512 * 512;
  for (int i = threadIdx.x; i < block_size; i += kThreads) shared_block[i] = block[i];
  for (int i = threadIdx.x; i < right_size; i += kThreads) shared_right[i] = right[i];
  ptx::fence_async_proxy();
  __syncthreads();
  using Products = sm90a::BlockProducts24<Element, N>;
  const uint64_t dense = ptx::wgmma_operand(shared_block);
  const uint64_t columns = ptx::wgmma_operand(shared_right, 64 * 128);
  for (int panel = 0; panel < (kKeys ? 1 : kPanels); ++panel) {
    float d[N / 2] = {};
    if constexpr (kKeys) {
      uint32_t words[kPanels];
      for (int i = 0; i < kPanels; ++i) words[i] = metadata[threadIdx.x * kPanels + i];
      const uint64_t non_zeros = kDim == 128 ? dense : ptx::wgmma_narrow_operand(shared_block);
      Products::keys(d, non_zeros, dense, columns, sparse, words);
    } else {
      Products::values(d, ptx::wgmma_advance(dense, panel * 32 * 128), ptx::wgmma_advance(dense, panel * 64 * 128),
                       columns, sparse, metadata[panel * kThreads + threadIdx.x]);
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(d);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < N / 2; ++i) {
      const int row = threadIdx.x / 32 * 16 + lane / 4 + i / 2 % 2 * 8;
      out[(panel * 64 + row) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
    }
  }
}

struct ProductCase {
  std::string name;
  DType dtype = DType::f16;
};

template <typename Element, int kDim, int N, bool kKeys>
int wrong_products(bool one_hot, Random& random) {
  const int lines = kKeys ? kBlock24Tokens : kDim;  // along which four neighbours lie
  const int sums = kKeys ? kDim : kBlock24Tokens;
  std::vector<uint16_t> plain(kBlock24Tokens * kDim);  // [token, dim]
  std::vector<int> values(plain.size());               // [line, neighbour]
  for (int line = 0; line < lines; ++line) {
    for (int four = 0; four < sums; four += 4) {
      const int first = pick(random, 0, 2);
      for (const int place : {first, pick(random, first + 1, 3)}) {
        const int value = pick(random, 1, 100) * (pick(random, 0, 1) * 2 - 1);
        values[line * sums + four + place] = value;
        plain[kKeys ? line * kDim + four + place : (four + place) * kDim + line] = bits_of<Element>(value);
      }
    }
  }
  const HostBlock sparse = compress_on_host(plain.data(), nullptr, kKeys ? KvOperand::keys : KvOperand::values,
                                            std::is_same_v<Element, __half> ? DType::f16 : DType::bf16, kDim);
  std::vector<uint16_t> dense(plain.size());
  for (int token = 0; token < kBlock24Tokens; ++token) {
    for (int dim = 0; dim < kDim; ++dim) {
      dense[dim / 64 * 4096 + swizzled(token, dim % 64)] = plain[token * kDim + dim];
    }
  }

  std::vector<int> columns(N * sums);
  std::vector<uint16_t> right((kKeys ? kDim / 64 * N : (N + 63) / 64 * 64) * 64);
  const int shift = pick(random, 0, sums - 1);
  for (int n = 0; n < N; ++n) {
    for (int k = 0; k < sums; ++k) {
      const int value = one_hot ? k == (n + shift) % sums : pick(random, -10, 10);
      columns[n * sums + k] = value;
      right[kKeys ? k / 64 * N * 64 + swizzled(n, k % 64) : n / 64 * 4096 + swizzled(k, n % 64)] =
          bits_of<Element>(value);
    }
  }

  const DeviceBuffer<uint16_t> right_buffer(right), sparse_buffer(sparse.non_zeros), dense_buffer(dense);
  const DeviceBuffer<uint32_t> metadata_buffer(sparse.metadata);
  int wrong = 0;
  for (const bool is_sparse : {false, true}) {
    const DeviceBuffer<float> out(std::vector<float>(lines * N, NAN));
    const auto& block = is_sparse ? sparse.non_zeros : dense;
    multiply_kernel<Element, kDim, N, kKeys><<<1, kThreads, 48 * 1024>>>(
        (is_sparse ? sparse_buffer : dense_buffer).get(), static_cast<int>(block.size()), metadata_buffer.get(),
        is_sparse, right_buffer.get(), static_cast<int>(right.size()), out.get());
    succeeds(cudaGetLastError());
    succeeds(cudaDeviceSynchronize());
    const std::vector<float> products = out.host();
    for (int line = 0; line < lines; ++line) {
      for (int n = 0; n < N; ++n) {
        int expected = 0;
        for (int k = 0; k < sums; ++k) expected += values[line * sums + k] * columns[n * sums + k];
        wrong += products[line * N + n] != static_cast<float>(expected);
      }
    }
  }
  return wrong;
}

template <typename Element>
Outcome multiply(Random& random) {
  int wrong = 0;
  for (const bool one_hot : {true, false}) {
    wrong += wrong_products<Element, 128, 96, true>(one_hot, random);
    wrong += wrong_products<Element, 128, 96, false>(one_hot, random);
    wrong += wrong_products<Element, 64, 64, true>(one_hot, random);
    wrong += wrong_products<Element, 64, 64, false>(one_hot, random);
  }
  return {wrong == 0, std::to_string(wrong) + " wrong"};
}

}  // namespace

TEST("wgmma.sp reads the blocks that the host writes") {
  const std::vector<ProductCase> cases{{"one-hot and integers, f16", DType::f16},
                                       {"one-hot and integers, bf16", DType::bf16}};
  run_cases(cases, [](const ProductCase& test, Random& random) {
    return with_16_bit_type(test.dtype, [&](auto element) { return multiply<decltype(element)>(random); });
  });
}

}  // namespace kv::tests
