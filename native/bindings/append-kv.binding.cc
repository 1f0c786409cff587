#include "kernels/append-kv/append-kv.h"

#include "bindings/paged-batch.h"

namespace kv {

// appendKv(stream, keys, values [token, kvHead, dim], the six arguments of PagedBatchTensors)
Napi::Value append_kv(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument keys = call.tensor(1);
  const TensorArgument values = call.tensor(2);
  const PagedBatchTensors tensors(call, 3);
  AppendKvArguments arguments;
  tensors.describe(arguments, keys.extent(0));
  arguments.keys = keys.data;
  arguments.values = values.data;
  arguments.row_token_stride = keys.stride(0);
  arguments.row_head_stride = keys.stride(1);
  arguments.row_dtype = keys.dtype();
  arguments.key_pool = call.output(3).data;
  arguments.value_pool = call.output(4).data;
  return call.enqueue("appendKv",
                      [arguments](ExecutionContext& context) { return append_kv(arguments, context); });
}

}  // namespace kv
