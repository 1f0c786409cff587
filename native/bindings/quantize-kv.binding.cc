#include "kernels/quantize-kv/quantize-kv.h"

#include "bindings/quantized-copies.h"

namespace kv {

// quantizeKv(stream, keys, values [block, blockToken, dim] or undefined, quantizedKeys, quantizedValues
//            [quantizedBlock, byte] or undefined, keyBits, valueBits, rotated, copies [from | to, copy])
Napi::Value quantize_kv(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  QuantizeKvArguments arguments;
  describe_quantized_copies(call, call.tensor(1), arguments);
  arguments.values = call.optional_tensor(2).data;
  arguments.quantized_keys = call.output(3).as<uint8_t>();
  arguments.quantized_values = call.optional_output(4).as<uint8_t>();
  return call.enqueue("quantizeKv", [arguments](ExecutionContext& context) { return quantize_kv(arguments, context); });
}

}  // namespace kv
