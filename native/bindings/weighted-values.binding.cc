#include "kernels/weighted-values/weighted-values.h"

#include "bindings/row-lists.h"

namespace kv {

// weightedValues(stream, valueRows [token, kvHead, chosen], weights [token, kvHead, chosen, groupHead],
//                counts [token, kvHead], values [valueBlock, blockToken, dim], output [token, queryHead, dim],
//                hostValueRows, hostWeights, hostCounts: as the first three, or undefined)
Napi::Value weighted_values(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument rows = call.tensor(1);
  const TensorArgument weights = call.tensor(2);
  const TensorArgument counts = call.tensor(3);
  const TensorArgument values = call.tensor(4);
  const OutputArgument output = call.output(5);
  const OutputArgument host_rows = call.optional_output(6);
  const OutputArgument host_weights = call.optional_output(7);
  const OutputArgument host_counts = call.optional_output(8);
  const bool lists_there = call.flag(6) ? host_rows.on_host && host_weights.on_host && host_counts.on_host
                                     : rows.on_host && weights.on_host && counts.on_host;
  expect_on_host(call, info, lists_there && values.on_host && output.on_host);
  WeightedValuesArguments arguments;
  read_row_lists(rows, counts, values, arguments);
  arguments.weights = weights.as<float>();
  arguments.group = static_cast<int32_t>(weights.extent(3));
  arguments.values = values.data;
  arguments.dtype = values.dtype();
  arguments.head_dim = static_cast<int32_t>(values.extent(2));
  arguments.output = output.as<float>();
  if (host_rows) arguments.room = {host_rows.as<int32_t>(), host_counts.as<int32_t>(), host_weights.as<float>()};
  return call.enqueue("weightedValues",
                      [arguments](ExecutionContext& context) { return weighted_values(arguments, context); });
}

}  // namespace kv
