// Element types of a tensor's storage. Computation and statistics are f32 or wider.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

enum class DType : uint8_t { f32, f16, bf16, i32, u32, i16, u16, i8, u8 };

constexpr size_t byte_size(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16:
      return 2;
    default:
      return 1;
  }
}

constexpr bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

}  // namespace kv
