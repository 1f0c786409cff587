#include "kernels/quantize-kv/quantize-kv.h"

#include "bindings/operation-call.h"

namespace kv {

// quantizeKv(stream, keys, values [block, blockToken, dim] or undefined, quantizedKeys, quantizedValues
//            [quantizedBlock, byte] or undefined, keyBits, valueBits, rotated, copies [from | to, copy])
Napi::Value quantize_kv(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument keys = call.tensor(1);
  const TensorArgument copies = call.tensor(8);
  QuantizeKvArguments arguments;
  arguments.keys = keys.data;
  arguments.values = call.optional_tensor(2).data;
  arguments.dtype = keys.dtype();
  arguments.block_stride = keys.stride(0);
  arguments.token_stride = keys.stride(1);
  arguments.head_dim = static_cast<int32_t>(keys.extent(2));
  arguments.quantized_keys = call.output(3).as<uint8_t>();
  arguments.quantized_values = call.optional_output(4).as<uint8_t>();
  arguments.key_bits = static_cast<int32_t>(call.integer(5));
  arguments.value_bits = static_cast<int32_t>(call.integer(6));
  arguments.rotated = call.flag(7);
  arguments.from = copies.as<int32_t>();
  arguments.to = arguments.from + copies.stride(0);
  arguments.copies = static_cast<int32_t>(copies.extent(1));
  return call.enqueue("quantizeKv", [arguments](ExecutionContext& context) { return quantize_kv(arguments, context); });
}

}  // namespace kv
