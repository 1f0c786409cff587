#include "kernels/decode-attention-quantized/decode-attention-quantized.h"

#include "bindings/paged-batch.h"

namespace kv {

// decodeAttentionQuantized(stream, query, output [token, queryHead, dim], logSumExp [token, queryHead] or undefined,
// quantizedKeys, quantizedValues [quantizedBlock, byte], blockTable [slot, kvHead, block], keyCounts [slot, kvHead],
// slots [batch], queryStart [boundary], scale, keyBits, valueBits, merge)
Napi::Value decode_attention_quantized(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument query = call.tensor(1);
  const TensorArgument keys = call.tensor(4);
  QuantizedAttentionArguments arguments;
  describe_tables(call, 6, query.extent(0), arguments);
  describe_query(query, arguments);
  describe_output(call, 2, arguments);
  arguments.block_count = static_cast<int32_t>(keys.extent(0));
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
