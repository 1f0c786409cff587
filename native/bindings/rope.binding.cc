#include "kernels/rope/rope.h"

#include "bindings/operation-call.h"

namespace kv {

// rope(stream, input [token, head, dim], positions [token], inverseFrequencies [pair], output, interleaved,
//      attentionScale)
Napi::Value rope(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument input = call.tensor(1);
  const TensorArgument positions = call.tensor(2);
  const TensorArgument inverse_frequencies = call.tensor(3);
  const OutputArgument output = call.output(4);
  RopeArguments arguments;
  arguments.input = input.data;
  arguments.input_token_stride = input.stride(0);
  arguments.input_head_stride = input.stride(1);
  arguments.output = output.data;
  arguments.output_token_stride = output.stride(0);
  arguments.output_head_stride = output.stride(1);
  arguments.dtype = input.dtype();
  arguments.positions = positions.as<int32_t>();
  arguments.inverse_frequencies = inverse_frequencies.as<float>();
  arguments.tokens = input.extent(0);
  arguments.heads = input.extent(1);
  arguments.head_dim = input.extent(2);
  arguments.pairs = inverse_frequencies.extent(0);
  arguments.convention = call.flag(5) ? RopeConvention::interleaved : RopeConvention::half_split;
  arguments.attention_scale = static_cast<float>(call.number(6));
  return call.enqueue("rope", [arguments](ExecutionContext& context) { return rope(arguments, context); });
}

}  // namespace kv
