#include "kernels/linear/linear.h"

#include "bindings/operation-call.h"

namespace kv {

// linear(stream, input [token, in], weight [out, in], bias [out] or undefined, output [token, out], accumulate)
Napi::Value linear(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument input = call.tensor(1);
  const TensorArgument weight = call.tensor(2);
  const TensorArgument bias = call.optional_tensor(3);
  const TensorArgument output = call.tensor(4);
  LinearArguments arguments;
  arguments.input = input.data;
  arguments.input_stride = input.stride(0);
  arguments.output = output.data;
  arguments.output_stride = output.stride(0);
  arguments.dtype = input.dtype();
  arguments.weight = weight.data;
  arguments.weight_stride = weight.stride(0);
  arguments.weight_dtype = weight.dtype();
  if (bias) {
    arguments.bias = bias.data;
    arguments.bias_dtype = bias.dtype();
  }
  arguments.tokens = input.extent(0);
  arguments.in_features = input.extent(1);
  arguments.out_features = weight.extent(0);
  arguments.accumulate = call.flag(5);
  return call.enqueue("linear", [arguments](ExecutionContext& context) { return linear(arguments, context); });
}

}  // namespace kv
