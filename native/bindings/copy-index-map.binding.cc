#include "kernels/copy-index-map/copy-index-map.h"

#include "bindings/operation-call.h"

namespace kv {

// copyIndexMap(stream, source, target [1, kvHead, block], from [copy], to [copy])
Napi::Value copy_index_map(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument source = call.tensor(1);
  const TensorArgument from = call.tensor(3);
  CopyIndexMapArguments arguments;
  arguments.source = source.as<int32_t>();
  arguments.target = call.output(2).as<int32_t>();
  arguments.kv_heads = static_cast<int32_t>(source.extent(1));
  arguments.table_width = static_cast<int32_t>(source.extent(2));
  arguments.from = from.as<int32_t>();
  arguments.to = call.tensor(4).as<int32_t>();
  arguments.copies = static_cast<int32_t>(from.extent(0));
  return call.enqueue("copyIndexMap",
                      [arguments](ExecutionContext& context) { return copy_index_map(arguments, context); });
}

}  // namespace kv
