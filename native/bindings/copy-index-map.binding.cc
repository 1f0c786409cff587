#include "kernels/copy-index-map/copy-index-map.h"

#include "bindings/operation-call.h"

namespace kv {

// copyIndexMap(stream, keys, values [slot, kvHead, block], fromSlot, toSlot, copies [from | to, copy])
Napi::Value copy_index_map(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  CopyIndexMapArguments arguments;
  for (const int operand : {0, 1}) {
    const OutputArgument table = call.output(1 + operand);
    arguments.source[operand] = table.as<int32_t>() + call.integer(3) * table.stride(0);
    arguments.target[operand] = table.as<int32_t>() + call.integer(4) * table.stride(0);
    arguments.kv_heads = static_cast<int32_t>(table.extent(1));
    arguments.table_width = static_cast<int32_t>(table.extent(2));
  }
  const TensorArgument copies = call.tensor(5);
  arguments.from = copies.as<int32_t>();
  arguments.to = arguments.from + copies.stride(0);
  arguments.copies = static_cast<int32_t>(copies.extent(1));
  return call.enqueue("copyIndexMap",
                      [arguments](ExecutionContext& context) { return copy_index_map(arguments, context); });
}

}  // namespace kv
