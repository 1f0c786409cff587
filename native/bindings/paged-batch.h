// Reads the tensors that say which rows belong to which sequence, and where the sequence's cache lies.
#pragma once

#include "bindings/operation-call.h"
#include "shared/paged/paged-attention.h"

namespace kv {

// Six consecutive arguments from `first` on: keys, values [block, blockToken, dim], blockTable
// [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch], queryStart [boundary].
struct PagedBatchTensors {
  TensorArgument keys;
  TensorArgument values;
  TensorArgument block_table;
  OutputArgument key_counts;  // appendKv increases them
  TensorArgument slots;
  TensorArgument query_start;

  PagedBatchTensors(OperationCall& call, size_t first)
      : keys(call.tensor(first)),
        values(call.tensor(first + 1)),
        block_table(call.tensor(first + 2)),
        key_counts(call.output(first + 3)),
        slots(call.tensor(first + 4)),
        query_start(call.tensor(first + 5)) {}

  void describe(PagedBatch& batch, int64_t tokens) const {
    batch.batch = static_cast<int32_t>(slots.extent(0));
    batch.kv_heads = static_cast<int32_t>(key_counts.extent(1));
    batch.head_dim = static_cast<int32_t>(keys.extent(2));
    batch.query_start = query_start.as<int32_t>();
    batch.query_tokens = static_cast<int32_t>(tokens);
    batch.slots = slots.as<int32_t>();
    batch.cache_dtype = keys.dtype();
    batch.block_stride = keys.stride(0);
    batch.token_stride = keys.stride(1);
    batch.block_tokens = static_cast<int32_t>(keys.extent(1));
    batch.block_count = static_cast<int32_t>(keys.extent(0));
    batch.block_table = block_table.as<int32_t>();
    batch.table_width = static_cast<int32_t>(block_table.extent(2));
    batch.key_counts = key_counts.as<int32_t>();
    batch.slot_count = static_cast<int32_t>(key_counts.extent(0));
  }

  // What an operation with queries [token, queryHead, dim] takes besides.
  template <class Arguments>
  void describe(Arguments& arguments, const TensorArgument& query) const {
    describe(arguments, query.extent(0));
    arguments.query = query.data;
    arguments.query_token_stride = query.stride(0);
    arguments.query_head_stride = query.stride(1);
    arguments.query_dtype = query.dtype();
    arguments.query_heads = static_cast<int32_t>(query.extent(1));
    arguments.keys = keys.data;
  }
};

// (stream, query, output [token, queryHead, dim], logSumExp [token, queryHead] or undefined, the six arguments of
// PagedBatchTensors, scale, causal)
inline PagedAttentionArguments paged_attention_arguments(OperationCall& call) {
  const TensorArgument query = call.tensor(1);
  const OutputArgument output = call.output(2);
  const PagedBatchTensors tensors(call, 4);
  PagedAttentionArguments arguments;
  tensors.describe(arguments, query);
  arguments.output = output.data;
  arguments.output_token_stride = output.stride(0);
  arguments.output_head_stride = output.stride(1);
  arguments.output_dtype = output.dtype();
  arguments.log_sum_exp = call.optional_output(3).as<float>();
  arguments.values = tensors.values.data;
  arguments.scale = static_cast<float>(call.number(10));
  arguments.causal = call.flag(11);
  return arguments;
}

}  // namespace kv
