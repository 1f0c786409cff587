// Reads the tensors of a cache of dense and 2:4 sparse blocks.
#pragma once

#include "bindings/paged-batch.h"
#include "shared/blocks-24/blocks-24.h"

namespace kv {

inline SparseBlocks24 sparse_blocks(const TensorArgument& non_zeros, const TensorArgument& metadata) {
  return {non_zeros.data, metadata.as<uint32_t>(), static_cast<int32_t>(non_zeros.extent(0))};
}

// First come the arguments of paged_attention_arguments, whose block table is here the index map of the keys. After
// them comes an object: valueTable [slot, kvHead, block], keyNonZeros, valueNonZeros [sparseBlock, element],
// keyMetadata, valueMetadata [sparseBlock, word], hasSparseKeys, hasSparseValues.
inline Attention24Arguments attention_24_arguments(OperationCall& call) {
  const auto tensor = [&call](const char* name) { return call.tensor(call.field(12, name)); };
  Attention24Arguments arguments;
  static_cast<PagedAttentionArguments&>(arguments) = paged_attention_arguments(call);
  arguments.value_table = tensor("valueTable").as<int32_t>();
  arguments.sparse_keys = sparse_blocks(tensor("keyNonZeros"), tensor("keyMetadata"));
  arguments.sparse_values = sparse_blocks(tensor("valueNonZeros"), tensor("valueMetadata"));
  arguments.has_sparse_keys = call.field(12, "hasSparseKeys").ToBoolean();
  arguments.has_sparse_values = call.field(12, "hasSparseValues").ToBoolean();
  return arguments;
}

}  // namespace kv
