// What the checks of the attention kernels share: device memory, and a float64 reference on the device.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "shared/paged/paged-attention.h"

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

void check(const kv::Status& status) {
  if (status.ok()) return;
  std::printf("%s\n", status.message.c_str());
  std::exit(2);
}

template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count, int byte = 0) : count_(count) {
    check(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)), "cudaMalloc");
    check(cudaMemset(data_, byte, std::max<size_t>(count, 1) * sizeof(T)), "cudaMemset");
  }
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size()) {
    check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }
  T* get() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> result(count_);
    check(cudaMemcpy(result.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return result;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

constexpr double kLag = 1.37;  // with 1 the largest weight would be 1, which rounding does not touch

template <typename Element>
__device__ double as_double(Element value) {
  return static_cast<double>(static_cast<float>(value));
}

// One block for each (row, query head): the exact result, and the one that the working precision allows.
// There outputs and weights have 16 bits, weights relative to a reference that lags behind the maximum, and adding a
// product to a score cuts off what f32 does not hold, as tensor cores do when they align the products of a step to the
// largest.
template <typename Element>
__global__ void reference_kernel(kv::PagedAttentionArguments arguments, int most_keys, double* exact,
                                 double* rounded, double* lse) {
  extern __shared__ double weights[];
  float* working_scores = reinterpret_cast<float*>(weights + most_keys);
  __shared__ double shared_maximum, shared_sum;
  const int row = blockIdx.x;
  const int head = blockIdx.y;
  int entry = 0;
  while (arguments.query_start[entry + 1] <= row) ++entry;
  const int queries = arguments.query_start[entry + 1] - arguments.query_start[entry];
  const int kv_head = head / (arguments.query_heads / arguments.kv_heads);
  const int64_t table_row = int64_t{arguments.slots[entry]} * arguments.kv_heads + kv_head;
  const int key_count = arguments.key_counts[table_row];
  const int seen =
      arguments.causal ? max(0, key_count - queries + (row - arguments.query_start[entry]) + 1) : key_count;
  const auto at = [&](const void* pool, int key) {
    const int block = arguments.block_table[table_row * arguments.table_width + key / arguments.block_tokens];
    return static_cast<const Element*>(pool) + block * arguments.block_stride +
           key % arguments.block_tokens * arguments.token_stride;
  };
  const Element* query = static_cast<const Element*>(arguments.query) + row * arguments.query_token_stride +
                         head * arguments.query_head_stride;
  for (int key = threadIdx.x; key < seen; key += blockDim.x) {
    double score = 0.0;
    float working_score = 0.0f;
    for (int dim = 0; dim < arguments.head_dim; ++dim) {
      const double product = as_double(query[dim]) * as_double(at(arguments.keys, key)[dim]);
      score += product;
      working_score = __double2float_rz(working_score + product);
    }
    weights[key] = score * arguments.scale;
    working_scores[key] = working_score * arguments.scale;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    shared_maximum = -INFINITY;
    for (int key = 0; key < seen; ++key) shared_maximum = fmax(shared_maximum, weights[key]);
    shared_sum = 0.0;
    for (int key = 0; key < seen; ++key) shared_sum += exp(weights[key] - shared_maximum);
    lse[int64_t{row} * arguments.query_heads + head] =
        seen > 0 ? shared_maximum + log(shared_sum) : -INFINITY;
  }
  __syncthreads();
  for (int dim = threadIdx.x; dim < arguments.head_dim; dim += blockDim.x) {
    double sum = 0.0;
    double rounded_sum = 0.0;
    double working_sum = 0.0;
    for (int key = 0; key < seen; ++key) {
      const double weight = exp(weights[key] - shared_maximum);
      const double value = as_double(at(arguments.values, key)[dim]);
      sum += weight * value;
      const double working_weight = kLag * exp(working_scores[key] - shared_maximum);
      rounded_sum += as_double(Element(static_cast<float>(working_weight))) * value;
      working_sum += working_weight;
    }
    const int64_t i = (int64_t{row} * arguments.query_heads + head) * arguments.head_dim + dim;
    exact[i] = seen > 0 ? sum / shared_sum : 0.0;
    rounded[i] = seen > 0 ? as_double(Element(static_cast<float>(rounded_sum / working_sum))) : 0.0;
  }
}

}  // namespace
