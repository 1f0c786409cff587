#include "kernels/copy-blocks/copy-blocks.h"

#include "bindings/operation-call.h"

namespace kv {

// copyBlocks(stream, pool [block, …], copies [from | to, copy])
Napi::Value copy_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument pool = call.output(1);
  const TensorArgument copies = call.tensor(2);
  CopyBlocksArguments arguments;
  arguments.pool = pool.data;
  arguments.block_bytes = pool.stride(0) * static_cast<int64_t>(byte_size(pool.dtype()));
  arguments.from = copies.as<int32_t>();
  arguments.to = arguments.from + copies.stride(0);
  arguments.copies = static_cast<int32_t>(copies.extent(1));
  return call.enqueue("copyBlocks",
                      [arguments](ExecutionContext& context) { return copy_blocks(arguments, context); });
}

}  // namespace kv
