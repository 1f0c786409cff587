#include "kernels/transfer-blocks/transfer-blocks.h"

#include <algorithm>

#include "bindings/operation-call.h"
#include "bindings/typed-array.h"

namespace kv {

// transferBlocks(stream, source [block, …], destination [block, …], copies: Int32Array [from | to, copy])
Napi::Value transfer_blocks(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument source = call.tensor(1);
  const OutputArgument destination = call.output(2);
  const ArrayBytes given = array_bytes(info[3]);
  const bool is_cuda = call.stream().device()->kind() == DeviceKind::cuda;
  if (is_cuda && source.on_host && destination.on_host) {
    throw make_error(info.Env(), "KV_INVALID_VALUE", "both pools are in host memory; give one of the device's memory");
  }
  const auto copies = std::make_shared<std::vector<int32_t>>(given.bytes / sizeof(int32_t));
  std::copy_n(given.data, given.bytes, reinterpret_cast<char*>(copies->data()));
  TransferBlocksArguments arguments;
  arguments.source = source.data;
  arguments.destination = destination.data;
  arguments.from_host = source.on_host;
  arguments.to_host = destination.on_host;
  arguments.block_bytes = source.stride(0) * static_cast<int64_t>(byte_size(source.dtype()));
  arguments.copies = static_cast<int32_t>(copies->size() / 2);
  arguments.from = copies->data();
  arguments.to = copies->data() + arguments.copies;
  return call.enqueue("transferBlocks", [arguments, copies](ExecutionContext& context) {
    return transfer_blocks(arguments, context);
  });
}

}  // namespace kv
