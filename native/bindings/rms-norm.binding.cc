#include "kernels/rms-norm/rms-norm.h"

#include "bindings/operation-call.h"

namespace kv {

// rmsNorm(stream, input [outer, inner, feature], weight [feature], output, epsilon)
Napi::Value rms_norm(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument input = call.tensor(1);
  const TensorArgument weight = call.tensor(2);
  const OutputArgument output = call.output(3);
  RmsNormArguments arguments;
  arguments.input = input.data;
  arguments.input_outer_stride = input.stride(0);
  arguments.output = output.data;
  arguments.output_outer_stride = output.stride(0);
  arguments.dtype = input.dtype();
  arguments.weight = weight.data;
  arguments.weight_dtype = weight.dtype();
  arguments.outer = input.extent(0);
  arguments.features = input.extent(input.layout.rank - 1);
  if (input.layout.rank == 3) {
    arguments.inner = input.extent(1);
    arguments.input_inner_stride = input.stride(1);
    arguments.output_inner_stride = output.stride(1);
  }
  arguments.epsilon = static_cast<float>(call.number(4));
  return call.enqueue("rmsNorm", [arguments](ExecutionContext& context) { return rms_norm(arguments, context); });
}

}  // namespace kv
