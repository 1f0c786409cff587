// Reads the tensors that say which rows belong to which sequence, and where the sequence's cache lies.
#pragma once

#include "bindings/operation-call.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Three consecutive arguments from `first` on: keyCounts [slot, kvHead], slots [batch], queryStart [boundary]. `rows` is
// the extent of the tensors of rows.
inline void describe_sequences(OperationCall& call, size_t first, int64_t rows, PagedBatch& to) {
  const OutputArgument counts = call.output(first);  // appendKv increases them
  const TensorArgument slots = call.tensor(first + 1);
  to.batch = static_cast<int32_t>(slots.extent(0));
  to.kv_heads = static_cast<int32_t>(counts.extent(1));
  to.query_start = call.tensor(first + 2).as<int32_t>();
  to.query_tokens = static_cast<int32_t>(rows);
  to.slots = slots.as<int32_t>();
  to.key_counts = counts.as<int32_t>();
  to.slot_count = static_cast<int32_t>(counts.extent(0));
}

// Four consecutive arguments: blockTable [slot, kvHead, block], and the three of describe_sequences.
inline void describe_tables(OperationCall& call, size_t first, int64_t rows, PagedBatch& to) {
  const TensorArgument table = call.tensor(first);
  to.block_table = table.as<int32_t>();
  to.table_width = static_cast<int32_t>(table.extent(2));
  describe_sequences(call, first + 1, rows, to);
}

// A pool of keys, [block, blockToken, dim].
inline void describe_pool(const TensorArgument& keys, PagedBatch& to) {
  to.head_dim = static_cast<int32_t>(keys.extent(2));
  to.cache_dtype = keys.dtype();
  to.block_stride = keys.stride(0);
  to.token_stride = keys.stride(1);
  to.block_tokens = static_cast<int32_t>(keys.extent(1));
  to.block_count = static_cast<int32_t>(keys.extent(0));
}

// Queries, [token, queryHead, dim].
template <class Arguments>
void describe_query(const TensorArgument& query, Arguments& to) {
  to.head_dim = static_cast<int32_t>(query.extent(2));
  to.query = query.data;
  to.query_token_stride = query.stride(0);
  to.query_head_stride = query.stride(1);
  to.query_dtype = query.dtype();
  to.query_heads = static_cast<int32_t>(query.extent(1));
}

// Two arguments from `first` on: output [token, queryHead, dim], logSumExp [token, queryHead] or undefined.
template <class Arguments>
void describe_output(OperationCall& call, size_t first, Arguments& to) {
  const OutputArgument output = call.output(first);
  to.output = output.data;
  to.output_token_stride = output.stride(0);
  to.output_head_stride = output.stride(1);
  to.output_dtype = output.dtype();
  to.log_sum_exp = call.optional_output(first + 1).as<float>();
}

// Six consecutive arguments from `first` on, which are all that a dense cache has: keys, values [block, blockToken, dim], and
// the four of describe_tables. `query` is [token, queryHead, dim].
template <class Arguments>
void describe_cache(OperationCall& call, size_t first, const TensorArgument& query, Arguments& to) {
  const TensorArgument keys = call.tensor(first);
  describe_pool(keys, to);
  describe_tables(call, first + 2, query.extent(0), to);
  describe_query(query, to);
  to.keys = keys.data;
}

// (stream, query, output [token, queryHead, dim], logSumExp [token, queryHead] or undefined, the six arguments of
// describe_cache, scale, causal)
inline PagedAttentionArguments paged_attention_arguments(OperationCall& call) {
  PagedAttentionArguments arguments;
  describe_cache(call, 4, call.tensor(1), arguments);
  describe_output(call, 2, arguments);
  arguments.values = call.tensor(5).data;
  arguments.scale = static_cast<float>(call.number(10));
  arguments.causal = call.flag(11);
  return arguments;
}

}  // namespace kv
