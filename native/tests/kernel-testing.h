// What tests of kernels share: elements of any float type in raw storage, random choices among parameters,
// and every instruction set in turn.
#pragma once

// The conversions of kernel code, built without any instruction set's flags.
#define KV_ISA elements
#include "shared/cpu/simd.cpu.h"
#undef KV_ISA

#include <initializer_list>
#include <random>
#include <vector>

#include "runtime/dtype.h"
#include "runtime/isa.h"

namespace kv {

inline void write_element(DType dtype, std::vector<uint8_t>& bytes, int64_t index, float value) {
  void* p = bytes.data() + static_cast<size_t>(index) * byte_size(dtype);
  if (dtype == DType::f16) {
    elements::from_float(static_cast<elements::Half*>(p), value);
  } else if (dtype == DType::bf16) {
    elements::from_float(static_cast<elements::Bfloat*>(p), value);
  } else {
    elements::from_float(static_cast<float*>(p), value);
  }
}

inline float read_element(DType dtype, const std::vector<uint8_t>& bytes, int64_t index) {
  const void* p = bytes.data() + static_cast<size_t>(index) * byte_size(dtype);
  if (dtype == DType::f16) return elements::to_float(*static_cast<const elements::Half*>(p));
  if (dtype == DType::bf16) return elements::to_float(*static_cast<const elements::Bfloat*>(p));
  return *static_cast<const float*>(p);
}

// `count` elements as doubles: oracles loop over these, since sanitizers make each read of raw storage dear.
inline std::vector<double> read_elements(DType dtype, const std::vector<uint8_t>& bytes, int64_t first,
                                         int64_t count) {
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = read_element(dtype, bytes, first + i);
  return values;
}

// Half the distance from 1 to the next number of the type.
inline double unit_roundoff(DType dtype) {
  return dtype == DType::f16 ? 0x1p-11 : dtype == DType::bf16 ? 0x1p-8 : 0x1p-24;
}

inline int pick(std::mt19937& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

template <class T>
T pick_from(std::mt19937& random, std::initializer_list<T> options) {
  return options.begin()[pick(random, 0, static_cast<int>(options.size()) - 1)];
}

// Runs a check on every instruction set that this processor has.
template <class Check>
void on_every_isa(Check&& body) {
  for (const Isa isa : {Isa::baseline, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (runs(isa)) body(isa);
  }
}

}  // namespace kv
