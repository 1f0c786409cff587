#include "kernels/embedding/embedding.h"

#include "bindings/operation-call.h"

namespace kv {

// embedding(stream, table [row, feature], ids [token], output [token, feature], nanOutside)
Napi::Value embedding(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument table = call.tensor(1);
  const TensorArgument ids = call.tensor(2);
  const OutputArgument output = call.output(3);
  EmbeddingArguments arguments;
  arguments.table = table.data;
  arguments.table_stride = table.stride(0);
  arguments.table_dtype = table.dtype();
  arguments.rows = table.extent(0);
  arguments.ids = ids.data;
  arguments.id_dtype = ids.dtype();
  arguments.output = output.data;
  arguments.output_stride = output.stride(0);
  arguments.output_dtype = output.dtype();
  arguments.tokens = ids.extent(0);
  arguments.features = table.extent(1);
  arguments.nan_outside = call.flag(4);
  return call.enqueue("embedding",
                      [arguments](ExecutionContext& context) { return embedding(arguments, context); });
}

}  // namespace kv
