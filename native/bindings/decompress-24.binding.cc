#include "kernels/decompress-24/decompress-24.h"

#include "bindings/blocks-24.h"

namespace kv {

// decompress24(stream, values: boolean, nonZeros [sparseBlock, element], metadata [sparseBlock, word], ids [block],
//              places [block], dense [block, blockToken, dim])
Napi::Value decompress_24(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument ids = call.tensor(4);
  const OutputArgument dense = call.output(6);
  Decompress24Arguments arguments;
  arguments.operand = call.flag(1) ? KvOperand::values : KvOperand::keys;
  arguments.dtype = dense.dtype();
  arguments.head_dim = static_cast<int32_t>(dense.extent(2));
  arguments.sparse = sparse_blocks(call.tensor(2), call.tensor(3));
  arguments.ids = ids.as<int32_t>();
  arguments.count = static_cast<int32_t>(ids.extent(0));
  arguments.places = call.tensor(5).as<int32_t>();
  arguments.dense = dense.data;
  arguments.dense_count = static_cast<int32_t>(dense.extent(0));
  return call.enqueue("decompress24",
                      [arguments](ExecutionContext& context) { return decompress_24(arguments, context); });
}

}  // namespace kv
