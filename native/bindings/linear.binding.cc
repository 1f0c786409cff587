#include "kernels/linear/linear.h"

#include <vector>

#include "bindings/operation-call.h"

namespace kv {

// linear(stream, input [token, in], rows [1] or undefined, accumulate, swiglu, then for each layer: weight [out, in],
// bias [out] or undefined, output [token, out])
Napi::Value linear(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument input = call.tensor(1);
  const TensorArgument rows = call.optional_tensor(2);
  std::vector<LinearArguments> layers;
  std::vector<const Storage*> weights;
  for (size_t argument = 5; argument + 2 < info.Length(); argument += 3) {
    const TensorArgument weight = call.tensor(argument);
    const TensorArgument bias = call.optional_tensor(argument + 1);
    const OutputArgument output = call.output(argument + 2);
    weights.push_back(weight.storage);
    LinearArguments layer;
    layer.input = input.data;
    layer.input_stride = input.stride(0);
    layer.output = output.data;
    layer.output_stride = output.stride(0);
    layer.dtype = input.dtype();
    layer.weight = weight.data;
    layer.weight_stride = weight.stride(0);
    layer.weight_dtype = weight.dtype();
    if (bias) {
      layer.bias = bias.data;
      layer.bias_dtype = bias.dtype();
    }
    layer.tokens = input.extent(0);
    if (rows) layer.rows = static_cast<const int32_t*>(rows.data);
    layer.in_features = input.extent(1);
    layer.out_features = weight.extent(0);
    layer.accumulate = call.flag(3);
    layer.gates_next = call.flag(4) && layers.empty();
    layers.push_back(layer);
  }
  return call.enqueue("linear", [layers, weights](ExecutionContext& context) mutable {
    // Now, not when it was enqueued: a recorded operation is launched again, after others that were enqueued later.
    for (size_t i = 0; i < layers.size(); ++i) layers[i].weight_at_rest = !weights[i]->written();
    return linear(layers, context);
  });
}

}  // namespace kv
