#include "kernels/weighted-values/weighted-values.h"

#include "bindings/operation-call.h"

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
  const bool cpu = call.stream().device()->kind() == DeviceKind::cpu;
  if (!cpu && !(rows.on_host && weights.on_host && counts.on_host && values.on_host && output.on_host)) {
    throw make_error(info.Env(), "KV_DEVICE",
                     "a tensor is in the device's memory, and the host sums; give tensors of device.hostTensor() or of a "
                     "host pool");
  }
  WeightedValuesArguments arguments;
  arguments.value_rows = rows.as<int32_t>();
  arguments.weights = weights.as<float>();
  arguments.counts = counts.as<int32_t>();
  arguments.rows = static_cast<int32_t>(rows.extent(0));
  arguments.kv_heads = static_cast<int32_t>(rows.extent(1));
  arguments.capacity = static_cast<int32_t>(rows.extent(2));
  arguments.group = static_cast<int32_t>(weights.extent(3));
  arguments.values = values.data;
  arguments.dtype = values.dtype();
  arguments.pool_rows = values.extent(0) * values.extent(1);
  arguments.head_dim = static_cast<int32_t>(values.extent(2));
  arguments.output = output.as<float>();
  return call.enqueue("weightedValues",
                      [arguments](ExecutionContext& context) { return weighted_values(arguments, context); });
}

}  // namespace kv
