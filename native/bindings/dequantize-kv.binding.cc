#include "kernels/dequantize-kv/dequantize-kv.h"

#include "bindings/quantized-copies.h"

namespace kv {

// dequantizeKv(stream, keys, values [block, blockToken, dim] or undefined, quantizedKeys, quantizedValues
//              [quantizedBlock, byte] or undefined, keyBits, valueBits, rotated, copies [from | to, copy])
Napi::Value dequantize_kv(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  DequantizeKvArguments arguments;
  describe_quantized_copies(call, call.output(1), arguments);
  arguments.values = call.optional_output(2).data;
  arguments.quantized_keys = call.tensor(3).as<uint8_t>();
  arguments.quantized_values = call.optional_tensor(4).as<uint8_t>();
  return call.enqueue("dequantizeKv",
                      [arguments](ExecutionContext& context) { return dequantize_kv(arguments, context); });
}

}  // namespace kv
