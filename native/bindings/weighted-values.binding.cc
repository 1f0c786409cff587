#include "kernels/weighted-values/weighted-values.h"

#include "bindings/row-lists.h"

namespace kv {

// weightedValues(stream, valueRows [token, kvHead, chosen], weights [token, kvHead, chosen, groupHead],
//                counts [token, kvHead], values [valueBlock, blockToken, dim], output [token, queryHead, dim])
Napi::Value weighted_values(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument rows = call.tensor(1);
  const TensorArgument weights = call.tensor(2);
  const TensorArgument counts = call.tensor(3);
  const TensorArgument values = call.tensor(4);
  const OutputArgument output = call.output(5);
  expect_on_host(call, info, rows.on_host && weights.on_host && counts.on_host && values.on_host && output.on_host);
  WeightedValuesArguments arguments;
  read_row_lists(rows, counts, values, arguments);
  arguments.weights = weights.as<float>();
  arguments.group = static_cast<int32_t>(weights.extent(3));
  arguments.values = values.data;
  arguments.dtype = values.dtype();
  arguments.head_dim = static_cast<int32_t>(values.extent(2));
  arguments.output = output.as<float>();
  return call.enqueue("weightedValues",
                      [arguments](ExecutionContext& context) { return weighted_values(arguments, context); });
}

}  // namespace kv
