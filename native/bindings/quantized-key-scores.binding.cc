#include "kernels/quantized-key-scores/quantized-key-scores.h"

#include "bindings/key-scores.h"

namespace kv {

// quantizedKeyScores(stream, query [token, queryHead, dim], scores [token, queryHead, key],
// quantizedKeys [quantizedBlock, byte], blockTable [slot, kvHead, block], keyCounts [slot, kvHead], slots [batch],
// queryStart [boundary], scale, keyBits, rotated)
Napi::Value quantized_key_scores(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument keys = call.tensor(3);
  QuantizedKeyScoresArguments arguments;
  describe_key_scores(call, 4, arguments);
  arguments.block_count = static_cast<int32_t>(keys.extent(0));
  arguments.keys = keys.as<uint8_t>();
  arguments.key_bits = static_cast<int32_t>(call.integer(9));
  arguments.rotated = call.flag(10);
  return call.enqueue("quantizedKeyScores",
                      [arguments](ExecutionContext& context) { return quantized_key_scores(arguments, context); });
}

}  // namespace kv
