#include "kernels/quantize-kv/quantize-kv.h"

#include "bindings/operation-call.h"

namespace kv {

// quantizeKv(stream, keys, values [block, blockToken, dim], quantizedKeys, quantizedValues [quantizedBlock, byte],
//            keyBits, valueBits, copies [from | to, copy])
Napi::Value quantize_kv(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument keys = call.tensor(1);
  const TensorArgument copies = call.tensor(7);
  QuantizeKvArguments arguments;
  arguments.keys = keys.data;
  arguments.values = call.tensor(2).data;
  arguments.dtype = keys.dtype();
  arguments.block_stride = keys.stride(0);
  arguments.token_stride = keys.stride(1);
  arguments.head_dim = static_cast<int32_t>(keys.extent(2));
  arguments.quantized_keys = call.output(3).as<uint8_t>();
  arguments.quantized_values = call.output(4).as<uint8_t>();
  arguments.key_bits = static_cast<int32_t>(call.integer(5));
  arguments.value_bits = static_cast<int32_t>(call.integer(6));
  arguments.from = copies.as<int32_t>();
  arguments.to = arguments.from + copies.stride(0);
  arguments.copies = static_cast<int32_t>(copies.extent(1));
  return call.enqueue("quantizeKv", [arguments](ExecutionContext& context) { return quantize_kv(arguments, context); });
}

}  // namespace kv
