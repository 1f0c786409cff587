#include "kernels/swiglu/swiglu.h"

#include "bindings/operation-call.h"

namespace kv {

// swiglu(stream, gate [token, feature], up [token, feature], output)
Napi::Value swiglu(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument gate = call.tensor(1);
  const TensorArgument up = call.tensor(2);
  const OutputArgument output = call.output(3);
  SwigluArguments arguments;
  arguments.gate = gate.data;
  arguments.gate_stride = gate.stride(0);
  arguments.up = up.data;
  arguments.up_stride = up.stride(0);
  arguments.output = output.data;
  arguments.output_stride = output.stride(0);
  arguments.dtype = gate.dtype();
  arguments.tokens = gate.extent(0);
  arguments.features = gate.extent(1);
  return call.enqueue("swiglu",
                      [arguments](ExecutionContext& context) { return swiglu(arguments, context); });
}

}  // namespace kv
