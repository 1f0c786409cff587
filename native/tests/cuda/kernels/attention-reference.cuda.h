// The float64 reference of the attention kernels on the device, and the comparison of their results with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "shared/attention/key-block-lists.h"
#include "tests/cuda/kernels/attention-cases.cuda.h"

namespace kv::tests {

constexpr double kLag = 1.37;  // with 1 the largest weight would be 1, which rounding does not touch

template <typename Element>
__device__ double as_double(Element value) {
  return static_cast<double>(static_cast<float>(value));
}

// Whether one of the blocks that are listed for a row of batch entry `entry` holds `key`.
inline __device__ bool is_listed(const PagedAttentionArguments& arguments, const KeyBlockLists& lists, int entry,
                                 int row, int head, int key) {
  int tile = (row - arguments.query_start[entry]) / kListedQueryTile;
  for (int before = 0; before < entry; ++before) {
    tile += query_tiles_of(arguments.query_start[before + 1] - arguments.query_start[before]);
  }
  const int32_t* blocks = lists.blocks_of(lists.list(head, tile));
  for (int i = 0; i < lists.count(head, tile); ++i) {
    if (blocks[i] == key / kKeyBlockTokens) return true;
  }
  return false;
}

// One block for each (row, query head): the exact result, and the one that the working precision allows.
// There outputs and weights have 16 bits, weights relative to a reference that lags behind the maximum, and adding a
// product to a score cuts off what f32 does not hold, as tensor cores do when they align the products of a step to the
// largest. With lists, rows attend to the listed blocks alone: all other scores are minus infinity.
template <typename Element>
__global__ void reference_kernel(PagedAttentionArguments arguments, KeyBlockLists lists, int most_keys, double* exact,
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
    const bool attends = lists.counts == nullptr || is_listed(arguments, lists, entry, row, head, key);
    weights[key] = attends ? score * arguments.scale : -INFINITY;
    working_scores[key] = attends ? working_score * arguments.scale : -INFINITY;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    shared_maximum = -INFINITY;
    for (int key = 0; key < seen; ++key) shared_maximum = fmax(shared_maximum, weights[key]);
    shared_sum = 0.0;
    for (int key = 0; key < seen; ++key) shared_sum += exp(weights[key] - shared_maximum);
    lse[int64_t{row} * arguments.query_heads + head] =
        shared_maximum > -INFINITY ? shared_maximum + log(shared_sum) : -INFINITY;
  }
  __syncthreads();
  for (int dim = threadIdx.x; dim < arguments.head_dim; dim += blockDim.x) {
    double sum = 0.0;
    double rounded_sum = 0.0;
    double working_sum = 0.0;
    for (int key = 0; key < seen; ++key) {
      if (weights[key] == -INFINITY) continue;
      const double weight = exp(weights[key] - shared_maximum);
      const double value = as_double(at(arguments.values, key)[dim]);
      sum += weight * value;
      const double working_weight = kLag * exp(working_scores[key] - shared_maximum);
      rounded_sum += as_double(Element(static_cast<float>(working_weight))) * value;
      working_sum += working_weight;
    }
    const int64_t i = (int64_t{row} * arguments.query_heads + head) * arguments.head_dim + dim;
    exact[i] = shared_maximum > -INFINITY ? sum / shared_sum : 0.0;
    rounded[i] =
        shared_maximum > -INFINITY ? as_double(Element(static_cast<float>(rounded_sum / working_sum))) : 0.0;
  }
}

// Compares what a kernel left in the operands' output and log-sum-exp with the reference. `arguments` name a plain
// cache of which no head has more than `most_keys` keys.
template <typename Element>
Outcome compare_with_reference(const PagedAttentionArguments& arguments, int most_keys,
                               const AttentionOperands<Element>& operands, const KeyBlockLists& lists = {}) {
  const int rows = arguments.query_tokens;
  const size_t outputs = size_t(rows) * arguments.query_heads * arguments.head_dim;
  DeviceBuffer<double> exact_buffer(outputs), rounded_buffer(outputs),
      exact_lse_buffer(size_t(rows) * arguments.query_heads);
  succeeds(
      cudaFuncSetAttribute(reference_kernel<Element>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
  reference_kernel<Element><<<dim3(rows, arguments.query_heads), 128, std::max(1, most_keys) * 12>>>(
      arguments, lists, std::max(1, most_keys), exact_buffer.get(), rounded_buffer.get(), exact_lse_buffer.get());
  succeeds(cudaGetLastError());
  succeeds(cudaDeviceSynchronize());

  const auto exact = exact_buffer.host(), rounded = rounded_buffer.host(), exact_lse = exact_lse_buffer.host();
  const auto output = operands.output.host();
  const auto lse = operands.log_sum_exp.host();
  double error = 0.0, allowed = 0.0, lse_error = 0.0;
  int failures = 0;
  for (size_t i = 0; i < outputs; ++i) {
    Element value;
    std::copy_n(reinterpret_cast<const unsigned char*>(&output[i]), 2, reinterpret_cast<unsigned char*>(&value));
    const double difference = std::abs(static_cast<double>(static_cast<float>(value)) - exact[i]);
    if (!(difference < INFINITY)) ++failures;  // NaN: not written, or garbage got in
    error = std::max(error, difference);
    allowed = std::max(allowed, std::abs(rounded[i] - exact[i]));
  }
  allowed = 2.0 * allowed + 1e-3;
  for (size_t i = 0; i < exact_lse.size(); ++i) {
    if (exact_lse[i] == -INFINITY) {
      if (lse[i] != -INFINITY) ++failures;
      continue;
    }
    // f32 scores of size s carry errors of about 2^-22 s.
    const double difference = std::abs(lse[i] - exact_lse[i]) / (1.0 + std::abs(exact_lse[i]));
    if (!(difference < INFINITY)) ++failures;
    lse_error = std::max(lse_error, difference);
  }
  for (size_t i = outputs; i < output.size(); ++i) failures += output[i] != kPoison;
  for (size_t i = exact_lse.size(); i < lse.size(); ++i) failures += !std::isnan(lse[i]);
  char line[100];
  std::snprintf(line, sizeof line, "error %.2e of %.2e, log-sum-exp %.1e, %d bad", error, allowed, lse_error, failures);
  return {failures == 0 && error <= allowed && lse_error <= 1e-5, line};
}

}  // namespace kv::tests
