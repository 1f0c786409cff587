#include "kernels/decode-attention-quantized/decode-attention-quantized.h"

#include "bindings/operation-call.h"

namespace kv {

// decodeAttentionQuantized(stream, query, output [token, queryHead, dim], logSumExp [token, queryHead] or undefined,
// quantizedKeys, quantizedValues [quantizedBlock, byte], blockTable [slot, kvHead, block], keyCounts [slot, kvHead],
// slots [batch], queryStart [boundary], scale, keyBits, valueBits, merge)
Napi::Value decode_attention_quantized(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument query = call.tensor(1);
  const OutputArgument output = call.output(2);
  const TensorArgument keys = call.tensor(4);
  const TensorArgument table = call.tensor(6);
  const OutputArgument counts = call.output(7);
  const TensorArgument slots = call.tensor(8);
  QuantizedAttentionArguments arguments;
  arguments.batch = static_cast<int32_t>(slots.extent(0));
  arguments.kv_heads = static_cast<int32_t>(counts.extent(1));
  arguments.head_dim = static_cast<int32_t>(query.extent(2));
  arguments.query_start = call.tensor(9).as<int32_t>();
  arguments.query_tokens = static_cast<int32_t>(query.extent(0));
  arguments.slots = slots.as<int32_t>();
  arguments.block_count = static_cast<int32_t>(keys.extent(0));
  arguments.block_table = table.as<int32_t>();
  arguments.table_width = static_cast<int32_t>(table.extent(2));
  arguments.key_counts = counts.as<int32_t>();
  arguments.slot_count = static_cast<int32_t>(counts.extent(0));
  arguments.query = query.data;
  arguments.query_token_stride = query.stride(0);
  arguments.query_head_stride = query.stride(1);
  arguments.query_dtype = query.dtype();
  arguments.query_heads = static_cast<int32_t>(query.extent(1));
  arguments.output = output.data;
  arguments.output_token_stride = output.stride(0);
  arguments.output_head_stride = output.stride(1);
  arguments.output_dtype = output.dtype();
  arguments.log_sum_exp = call.optional_output(3).as<float>();
  arguments.keys = keys.data;
  arguments.values = call.tensor(5).data;
  arguments.scale = static_cast<float>(call.number(10));
  arguments.key_bits = static_cast<int32_t>(call.integer(11));
  arguments.value_bits = static_cast<int32_t>(call.integer(12));
  arguments.merge = call.flag(13);
  return call.enqueue("decodeAttentionQuantized",
                      [arguments](ExecutionContext& context) { return decode_attention_quantized(arguments, context); });
}

}  // namespace kv
