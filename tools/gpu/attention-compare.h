// What the checks of prefill attention share: poison around what a kernel writes, and the comparison of its results.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "attention-reference.h"

namespace {

constexpr int kGuardRows = 3;
constexpr uint16_t kPoison = 0x7fff;  // NaN in f16 and bf16

struct Sequence {
  int queries;
  int keys;
};

// Compares what a kernel left in the arguments' output and log-sum-exp with the reference. Both buffers have kGuardRows
// rows more, poisoned as all were. No head has more than `most_keys` keys. Prints a line; returns 1 if they differ.
template <typename Element>
int compare(const std::string& name, const kv::PagedAttentionArguments& arguments, int most_keys,
            const DeviceBuffer<uint16_t>& output_buffer, const DeviceBuffer<float>& lse_buffer) {
  const int rows = arguments.query_tokens;
  const size_t outputs = size_t(rows) * arguments.query_heads * arguments.head_dim;
  DeviceBuffer<double> exact_buffer(outputs), rounded_buffer(outputs),
      exact_lse_buffer(size_t(rows) * arguments.query_heads);
  check(cudaFuncSetAttribute(reference_kernel<Element>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             200 * 1024),
        "attribute");
  reference_kernel<Element><<<dim3(rows, arguments.query_heads), 128, std::max(1, most_keys) * 12>>>(
      arguments, std::max(1, most_keys), exact_buffer.get(), rounded_buffer.get(), exact_lse_buffer.get());
  check(cudaDeviceSynchronize(), "reference");

  const auto exact = exact_buffer.host(), rounded = rounded_buffer.host(),
             exact_lse = exact_lse_buffer.host();
  const auto output = output_buffer.host();
  const auto lse = lse_buffer.host();
  double error = 0.0, allowed = 0.0, lse_error = 0.0;
  int failures = 0;
  for (size_t i = 0; i < outputs; ++i) {
    Element value;
    std::copy_n(reinterpret_cast<const unsigned char*>(&output[i]), 2,
                reinterpret_cast<unsigned char*>(&value));
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
  const bool passed = failures == 0 && error <= allowed && lse_error <= 1e-5;
  std::printf("%s %-58s error %.2e of %.2e, log-sum-exp %.1e, %d bad\n", passed ? "pass" : "FAIL",
              name.c_str(), error, allowed, lse_error, failures);
  return passed ? 0 : 1;
}

}  // namespace
