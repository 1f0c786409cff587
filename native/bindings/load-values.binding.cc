#include "kernels/load-values/load-values.h"

#include "bindings/operation-call.h"

namespace kv {

// loadValues(stream, values [block, blockToken, dim], hostValues [valueBlock, blockToken, dim],
//            valueScales [valueBlock, blockToken] or undefined, copies [from | to, copy])
Napi::Value load_values(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument values = call.output(1);
  const TensorArgument copies = call.tensor(4);
  LoadValuesArguments arguments;
  arguments.values = values.data;
  arguments.dtype = values.dtype();
  arguments.block_stride = values.stride(0);
  arguments.token_stride = values.stride(1);
  arguments.head_dim = static_cast<int32_t>(values.extent(2));
  arguments.pool = call.tensor(2).data;
  arguments.scales = call.optional_tensor(3).as<uint16_t>();
  arguments.from = copies.as<int32_t>();
  arguments.to = arguments.from + copies.stride(0);
  arguments.copies = static_cast<int32_t>(copies.extent(1));
  return call.enqueue("loadValues", [arguments](ExecutionContext& context) { return load_values(arguments, context); });
}

}  // namespace kv
