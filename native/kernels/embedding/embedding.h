// Rows of a table by number: output[t] = table[ids[t]]. The rows are embeddings of tokens, or activations.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/dtype.h"
#include "runtime/execution.h"
#include "runtime/fault.h"
#include "runtime/status.h"

namespace kv {

struct EmbeddingArguments {
  const void* table = nullptr;  // [row, feature]; strides count elements, features are contiguous
  int64_t table_stride = 0;
  DType table_dtype = DType::f32;
  int64_t rows = 0;
  const void* ids = nullptr;  // [token], i32 or u32
  DType id_dtype = DType::i32;
  void* output = nullptr;  // [token, feature]; must not overlap the table
  int64_t output_stride = 0;
  DType output_dtype = DType::f32;  // f32, or the table's dtype
  int64_t tokens = 0;
  int64_t features = 0;
  bool nan_outside = false;  // gives a row of NaN for an id that the table does not have
};

// The row that a token asks for, which may not exist. Static, so that each instruction set has its own copy.
static inline int64_t row_of(const EmbeddingArguments& a, int64_t token) {
  return a.id_dtype == DType::u32 ? static_cast<int64_t>(static_cast<const uint32_t*>(a.ids)[token])
                                  : static_cast<int64_t>(static_cast<const int32_t*>(a.ids)[token]);
}

enum class EmbeddingFault : int32_t { id_out_of_range = 1 };  // value: the id; row: the token

std::string describe_embedding_fault(const Fault& fault);

// Without `nan_outside`, invalid_value names the first id that the table does not have, and nothing is written.
Status embedding(const EmbeddingArguments& arguments, ExecutionContext& context);

}  // namespace kv
