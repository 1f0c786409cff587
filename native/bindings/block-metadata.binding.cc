#include "kernels/block-metadata/block-metadata.h"

#include "bindings/paged-batch.h"

namespace kv {

// blockMetadata(stream, keys [block, blockToken, dim], blockTable [slot, kvHead, block], keyCounts [slot, kvHead],
//               slots [batch], queryStart [boundary], metadataTable [slot, kvHead, block],
//               metadata [metadataBlock, vector, dim], values [block, blockToken, dim] or undefined, checksums [metadataBlock] or undefined,
//               rows, method)
Napi::Value block_metadata(const Napi::CallbackInfo& info) {
  OperationCall call(info);
  const TensorArgument keys = call.tensor(1);
  const OutputArgument metadata = call.output(7);
  BlockMetadataArguments arguments;
  describe_pool(keys, arguments);
  describe_tables(call, 2, call.integer(10), arguments);
  arguments.keys = keys.data;
  arguments.metadata_table = call.tensor(6).as<int32_t>();
  arguments.metadata = metadata.data;
  arguments.metadata_blocks = static_cast<int32_t>(metadata.extent(0));
  arguments.values = call.optional_tensor(8).data;
  arguments.checksums = call.optional_output(9).as<uint32_t>();
  arguments.method = static_cast<BlockMetadataMethod>(call.integer(11));
  return call.enqueue("blockMetadata", [arguments](ExecutionContext& context) { return block_metadata(arguments, context); });
}

}  // namespace kv
