#include "kernels/compress-24/compress-24.h"

#include "bindings/operation-call.h"

namespace kv {

// compress24(stream, values: boolean, dense [denseBlock, blockToken, dim], nonZeros [sparseBlock, element],
//            metadata [sparseBlock, word], table [slot, kvHead, block], prunings [pruning, field], ids [id],
//            mostBlocks, elementMask [kvHead, blockToken, dim] or undefined,
//            blockLoss [slot, kvHead, block] or undefined)
Napi::Value compress_24(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const OutputArgument dense = call.output(2);
  const OutputArgument non_zeros = call.output(3);
  const OutputArgument table = call.output(5);
  const TensorArgument prunings = call.tensor(6);
  const TensorArgument ids = call.tensor(7);
  Compress24Arguments arguments;
  arguments.operand = call.flag(1) ? KvOperand::values : KvOperand::keys;
  arguments.dtype = dense.dtype();
  arguments.head_dim = static_cast<int32_t>(dense.extent(2));
  arguments.dense = dense.data;
  arguments.dense_block_count = static_cast<int32_t>(dense.extent(0));
  arguments.non_zeros = non_zeros.data;
  arguments.metadata = call.output(4).as<uint32_t>();
  arguments.sparse_block_count = static_cast<int32_t>(non_zeros.extent(0));
  arguments.table = table.as<int32_t>();
  arguments.table_width = static_cast<int32_t>(table.extent(2));
  arguments.kv_heads = static_cast<int32_t>(table.extent(1));
  arguments.slot_count = static_cast<int32_t>(table.extent(0));
  arguments.prunings = prunings.as<Pruning>();
  arguments.pruning_count = static_cast<int32_t>(prunings.extent(0));
  arguments.most_blocks = static_cast<int32_t>(call.integer(8));
  arguments.ids = ids.as<int32_t>();
  arguments.id_count = static_cast<int32_t>(ids.extent(0));
  arguments.element_mask = call.optional_tensor(9).as<uint8_t>();
  arguments.block_loss = call.optional_output(10).as<float>();
  return call.enqueue("compress24",
                      [arguments](ExecutionContext& context) { return compress_24(arguments, context); });
}

}  // namespace kv
