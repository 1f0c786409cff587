#include "kernels/copy-values/copy-values.h"

#include "bindings/operation-call.h"

namespace kv {

// copyValues(stream, values [block, blockToken, dim], hostValues [valueBlock, blockToken, dim],
//            valueScales [valueBlock, blockToken] or undefined, copies [from | to, copy])
Napi::Value copy_values(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument values = call.tensor(1);
  const TensorArgument copies = call.tensor(4);
  CopyValuesArguments arguments;
  arguments.values = values.data;
  arguments.dtype = values.dtype();
  arguments.block_stride = values.stride(0);
  arguments.token_stride = values.stride(1);
  arguments.head_dim = static_cast<int32_t>(values.extent(2));
  arguments.pool = call.output(2).data;
  arguments.scales = call.optional_output(3).as<uint16_t>();
  arguments.from = copies.as<int32_t>();
  arguments.to = arguments.from + copies.stride(0);
  arguments.copies = static_cast<int32_t>(copies.extent(1));
  return call.enqueue("copyValues", [arguments](ExecutionContext& context) { return copy_values(arguments, context); });
}

}  // namespace kv
