// Random dense blocks that are quantized and restored, for tests that compare devices and instruction sets.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/dequantize-kv/dequantize-kv.h"
#include "kernels/quantize-kv/quantize-kv.h"
#include "runtime/workers.h"
#include "shared/quantized-blocks/quantized-blocks.h"
#include "tests/kernel-testing.h"

namespace kv {

struct QuantizedCase {
  using Bytes = std::vector<uint8_t>;

  DType dtype = DType::f32;
  int head_dim = 0;
  int key_bits = 8;
  int value_bits = 8;
  bool rotated = true;
  bool keys_alone = false;
  int blocks = 0;
  int token_stride = 0;
  Bytes keys;
  Bytes values;
  Bytes quantized_keys;
  Bytes quantized_values;
  Bytes restored_keys;
  Bytes restored_values;
  std::vector<int32_t> from;  // the dense block of each copy, to be restored where it was
  std::vector<int32_t> to;

  int64_t dense_elements() const { return int64_t{blocks} * kQuantizedBlockTokens * token_stride; }

  // A NaN or an infinity here and there.
  Bytes random_elements(std::mt19937& random) const {
    std::normal_distribution<float> normal(0, pick_from(random, {1e-6f, 1.0f, 1000.0f}));
    Bytes bytes(static_cast<size_t>(dense_elements()) * byte_size(dtype));
    for (int64_t i = 0; i < dense_elements(); ++i) {
      const int kind = pick(random, 0, 5000);
      write_element(dtype, bytes, i, kind == 0 ? NAN : kind == 1 ? INFINITY : kind < 500 ? 0.0f : normal(random));
    }
    return bytes;
  }

  static QuantizedCase random(std::mt19937& random, DType dtype, int head_dim, int blocks) {
    QuantizedCase test;
    test.dtype = dtype;
    test.head_dim = head_dim;
    test.key_bits = pick_from(random, {8, 4, 3, 2});
    test.value_bits = pick_from(random, {8, 4, 3, 2});
    test.rotated = pick(random, 0, 2) > 0;
    test.keys_alone = pick(random, 0, 3) == 0;
    test.blocks = blocks;
    test.token_stride = head_dim + pick_from(random, {0, 3});
    test.keys = test.random_elements(random);
    test.values = test.random_elements(random);
    test.quantized_keys.assign(static_cast<size_t>(blocks * quantized_block_bytes(head_dim, test.key_bits)), 0xa5);
    test.quantized_values.assign(static_cast<size_t>(blocks * quantized_block_bytes(head_dim, test.value_bits)), 0xa5);
    test.restored_keys.assign(test.keys.size(), 0xa5);
    test.restored_values.assign(test.values.size(), 0xa5);
    test.from.resize(static_cast<size_t>(pick(random, 1, blocks)));
    std::vector<int32_t> order(static_cast<size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::copy_n(order.begin(), test.from.size(), test.from.begin());
    std::shuffle(order.begin(), order.end(), random);
    test.to.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(test.from.size()));
    return test;
  }

  static QuantizedCase random(std::mt19937& random) {
    const DType dtype = pick_from(random, {DType::f32, DType::f16, DType::bf16});
    const int head_dim = pick_from(random, {1, 7, 20, 48, 64, 80, 96, 128, 192, 256, 512});
    return QuantizedCase::random(random, dtype, head_dim, pick(random, 1, 5));
  }

  // The arguments, with pointers to this memory.
  QuantizeKvArguments quantization() {
    QuantizeKvArguments a;
    a.keys = keys.data();
    a.values = keys_alone ? nullptr : values.data();
    a.dtype = dtype;
    a.block_stride = int64_t{kQuantizedBlockTokens} * token_stride;
    a.token_stride = token_stride;
    a.head_dim = head_dim;
    a.quantized_keys = quantized_keys.data();
    a.quantized_values = quantized_values.data();
    a.key_bits = key_bits;
    a.value_bits = value_bits;
    a.rotated = rotated;
    a.from = from.data();
    a.to = to.data();
    a.copies = static_cast<int32_t>(from.size());
    return a;
  }

  DequantizeKvArguments dequantization() {
    DequantizeKvArguments a;
    a.quantized_keys = quantized_keys.data();
    a.quantized_values = quantized_values.data();
    a.key_bits = key_bits;
    a.value_bits = value_bits;
    a.rotated = rotated;
    a.keys = restored_keys.data();
    a.values = keys_alone ? nullptr : restored_values.data();
    a.dtype = dtype;
    a.block_stride = int64_t{kQuantizedBlockTokens} * token_stride;
    a.token_stride = token_stride;
    a.head_dim = head_dim;
    a.from = to.data();
    a.to = from.data();
    a.copies = static_cast<int32_t>(from.size());
    return a;
  }

  bool quantizes_like(const QuantizedCase& other) const {
    return quantized_keys == other.quantized_keys && quantized_values == other.quantized_values;
  }

  // Of numbers that are NaN the bits may differ.
  bool restores_like(const QuantizedCase& other) const {
    return same_numbers(restored_keys, other.restored_keys) && same_numbers(restored_values, other.restored_values);
  }
  bool same_numbers(const Bytes& a, const Bytes& b) const {
    const std::vector<double> left = read_elements(dtype, a, 0, dense_elements());
    const std::vector<double> right = read_elements(dtype, b, 0, dense_elements());
    return std::equal(left.begin(), left.end(), right.begin(),
                      [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
  }

  bool run_on_cpu(Isa isa, int threads) {
    Workers workers(threads);
    ExecutionContext context{workers, isa};
    return quantize_kv(quantization(), context).ok() && dequantize_kv(dequantization(), context).ok();
  }
};

}  // namespace kv
