#include "kernels/gather-kv/gather-kv.h"

#include "bindings/operation-call.h"

namespace kv {

// gatherKv(stream, keys, values [block, blockToken, dim], blockTable [1, kvHead, block], keyCounts [1, kvHead],
//          indices [kvHead, kept], counts [kvHead], outcomes [kvHead] or undefined)
Napi::Value gather_kv(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument keys = call.output(1);
  const OutputArgument values = call.output(2);
  const TensorArgument block_table = call.tensor(3);
  const OutputArgument key_counts = call.output(4);
  const TensorArgument indices = call.tensor(5);
  const OutputArgument outcomes = call.optional_output(7);
  GatherKvArguments arguments;
  arguments.key_pool = keys.data;
  arguments.value_pool = values.data;
  arguments.cache_dtype = keys.dtype();
  arguments.block_stride = keys.stride(0);
  arguments.token_stride = keys.stride(1);
  arguments.block_tokens = static_cast<int32_t>(keys.extent(1));
  arguments.block_count = static_cast<int32_t>(keys.extent(0));
  arguments.block_table = block_table.as<int32_t>();
  arguments.table_width = static_cast<int32_t>(block_table.extent(2));
  arguments.key_counts = key_counts.as<int32_t>();
  arguments.indices = indices.as<int32_t>();
  arguments.index_stride = indices.stride(0);
  arguments.counts = call.tensor(6).as<int32_t>();
  if (outcomes) arguments.outcomes = outcomes.as<int32_t>();
  arguments.kv_heads = static_cast<int32_t>(indices.extent(0));
  arguments.head_dim = static_cast<int32_t>(keys.extent(2));
  return call.enqueue("gatherKv", [arguments](ExecutionContext& context) { return gather_kv(arguments, context); });
}

}  // namespace kv
