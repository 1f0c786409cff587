#include "kernels/forget-blocks/forget-blocks.h"

#include "bindings/operation-call.h"

namespace kv {

// forgetBlocks(stream, blockTable [slot, kvHead, block], keyCounts [slot, kvHead], where [hostBlock], blockTokens)
Napi::Value forget_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument table = call.tensor(1);
  const TensorArgument counts = call.tensor(2);
  const OutputArgument where = call.output(3);
  ForgetBlocksArguments arguments;
  arguments.slot_count = static_cast<int32_t>(counts.extent(0));
  arguments.kv_heads = static_cast<int32_t>(counts.extent(1));
  arguments.key_counts = counts.as<int32_t>();
  arguments.block_table = table.as<int32_t>();
  arguments.table_width = static_cast<int32_t>(table.extent(2));
  arguments.where = where.as<int32_t>();
  arguments.block_count = static_cast<int32_t>(where.extent(0));
  arguments.block_tokens = static_cast<int32_t>(call.integer(4));
  return call.enqueue("forgetBlocks", [arguments](ExecutionContext& context) { return forget_blocks(arguments, context); });
}

}  // namespace kv
